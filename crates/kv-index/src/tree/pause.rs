//! Points at which tests let the other side run: between any two steps of a reader, or of the writer. Nothing otherwise.

/// The other side may run here.
#[cfg(not(test))]
#[inline(always)]
pub(super) fn point() {}

/// Whether readers are to skip their checks: tests show with it that they would notice.
#[cfg(not(test))]
#[inline(always)]
pub(super) fn checks_are_off() -> bool {
    false
}

#[cfg(test)]
pub(super) use hook::{checks_are_off, point, with_checks_off, with_hook};

#[cfg(test)]
mod hook {
    use std::cell::{Cell, RefCell};

    type Hook = Box<dyn FnMut()>;

    thread_local! {
        static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
        static CHECKS_OFF: Cell<bool> = const { Cell::new(false) };
    }

    /// Runs the hook of this thread, which itself meets no points.
    pub(in crate::tree) fn point() {
        let hook = HOOK.with(|cell| cell.borrow_mut().take());
        if let Some(mut hook) = hook {
            hook();
            HOOK.with(|cell| *cell.borrow_mut() = Some(hook));
        }
    }

    pub(in crate::tree) fn checks_are_off() -> bool {
        CHECKS_OFF.get()
    }

    /// Runs `hook` at every point that `body` comes to.
    pub(in crate::tree) fn with_hook<R>(hook: Hook, body: impl FnOnce() -> R) -> R {
        HOOK.with(|cell| *cell.borrow_mut() = Some(hook));
        let result = body();
        HOOK.with(|cell| *cell.borrow_mut() = None);
        result
    }

    pub(in crate::tree) fn with_checks_off<R>(body: impl FnOnce() -> R) -> R {
        CHECKS_OFF.set(true);
        let result = body();
        CHECKS_OFF.set(false);
        result
    }
}
