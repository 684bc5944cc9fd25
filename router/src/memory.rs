//! Memory that has been freed: used again, or back to the system.
//!
//! glibc keeps what is freed for the next allocation. After a burst that needed several times what stays in use, the
//! router has no use for it, and its pod may have a limit.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// From the end of a large request until memory is given back: what ends meanwhile is given back with it.
const DELAY: Duration = Duration::from_secs(2);

/// Free memory at the end of a heap above which glibc gives it back by itself. Where nothing is said, what it keeps grows with
/// the largest allocation that was ever freed, up to 64 MB a heap.
const KEPT: usize = 16 << 20;

/// Allocations of this size and more are mappings of their own, gone when they are freed.
const MAPPED: usize = 4 << 20;

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod glibc {
    use std::ffi::{c_int, c_void};

    use parking_lot::Mutex;

    const M_TRIM_THRESHOLD: c_int = -1;
    const M_MMAP_THRESHOLD: c_int = -3;
    const M_ARENA_MAX: c_int = -8;
    /// From this size on, `free` looks whether the heap's end can be given back.
    const LARGE: usize = 128 << 10;

    unsafe extern "C" {
        fn mallopt(parameter: c_int, value: c_int) -> c_int;
        fn malloc_trim(pad: usize) -> c_int;
        fn malloc(size: usize) -> *mut c_void;
        fn free(memory: *mut c_void);
    }

    /// For one thread after the other: what one sets another may be about to take back.
    static SETTING: Mutex<()> = Mutex::new(());

    fn set(parameter: c_int, value: usize) {
        // SAFETY: the signature is glibc's, and any value is good. It writes one aligned word, under a lock of glibc's; threads that
        // allocate meanwhile read the word before or after, and give back a heap's end a little sooner or later.
        unsafe { mallopt(parameter, c_int::try_from(value).unwrap_or(c_int::MAX)) };
    }

    pub(super) fn share_heaps() {
        set(M_ARENA_MAX, 1 + std::thread::available_parallelism().map_or(1, usize::from));
        set(M_MMAP_THRESHOLD, super::MAPPED);
        set(M_TRIM_THRESHOLD, super::KEPT);
    }

    pub(super) fn give_back_end() {
        let _one = SETTING.lock();
        set(M_TRIM_THRESHOLD, 0);
        // SAFETY: the signatures are glibc's; what is allocated is freed, once, and never read. `black_box` keeps both.
        unsafe { free(std::hint::black_box(malloc(LARGE))) };
        set(M_TRIM_THRESHOLD, super::KEPT);
    }

    pub(super) fn give_back() {
        give_back_end();
        // SAFETY: the signature is glibc's; the function may be called at any time, from any thread.
        unsafe { malloc_trim(0) };
    }
}

/// Lets threads share one heap more than there are cores, where glibc would make eight times as many: what one has freed another
/// can use. The main thread has the first, and those of the runtime, which begin before all others, one each: two of them on the
/// same heap wait for its lock several times a request. To be called before there are threads.
pub fn share_heaps() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    glibc::share_heaps();
}

/// Gives back the end of the calling thread's heap as far as it is free. [`give_back`] leaves it alone in the heaps of other
/// threads: a thread that needed much for a moment calls this before it ends.
pub(crate) fn give_back_end() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    glibc::give_back_end();
}

/// Gives back what is free in all heaps, and the end of the calling thread's. Cost: up to 0.1 s, while other threads may wait for the
/// allocator; not for the path of a request.
pub(crate) fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    glibc::give_back();
}

/// Gives back what is free in [`DELAY`], on a blocking thread; not more often than that, however often it is called. Does
/// nothing outside of a runtime.
pub(crate) fn give_back_soon() {
    let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
    let Some(due) = Due::first() else { return };
    runtime.spawn(async {
        tokio::time::sleep(DELAY).await;
        drop(due);
        // Nobody waits for it.
        drop(tokio::task::spawn_blocking(give_back));
    });
}

/// Memory will be given back while this lives, or its runtime has ended.
struct Due;

static DUE: AtomicBool = AtomicBool::new(false);

impl Due {
    fn first() -> Option<Due> {
        (!DUE.swap(true, Ordering::AcqRel)).then_some(Due)
    }
}

impl Drop for Due {
    fn drop(&mut self) {
        DUE.store(false, Ordering::Release);
    }
}
