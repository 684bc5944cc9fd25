//! A task that is woken while it runs goes on at once.
//!
//! To a multi-threaded runtime a task that wakes itself is work for others: it goes to the end of the queue, and a sleeping thread
//! is woken to take it. An HTTP/1 connection does so two or three times a request, since its reader and the handler of its
//! request are halves of one task that wake each other. Every time cost a system call here, a thread switch there, and the
//! request's memory moved to another core.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures::task::AtomicWaker;

/// Turns in a row, after which other tasks have theirs: two or three that a request takes, and as many again for the next one of
/// a client that does not wait for answers.
const TURNS: usize = 8;

/// Nobody has woken it since it was polled.
const WAITING: u8 = 0;
/// It is being polled.
const POLLED: u8 = 1;
/// It was woken, and will be polled again.
const WOKEN: u8 = 2;

/// Polls a future again at once, up to [`TURNS`] times, while it is woken during its poll. Cost beside the future's own: two
/// allocations in all, and a handful of atomic operations on memory of its own for each poll and each wake.
pub(crate) struct Again<F> {
    future: Pin<Box<F>>,
    state: Arc<State>,
    waker: Waker,
}

#[derive(Default)]
struct State {
    turn: AtomicU8,
    task: AtomicWaker,
}

impl Wake for State {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.turn.swap(WOKEN, Ordering::AcqRel) == WAITING {
            self.task.wake();
        }
    }
}

impl<F> Again<F> {
    pub(crate) fn new(future: F) -> Self {
        let state = Arc::<State>::default();
        Self { future: Box::pin(future), waker: state.clone().into(), state }
    }
}

impl<F: Future> Future for Again<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        this.state.task.register(cx.waker());
        for _ in 0..TURNS {
            // Not a store: what was done before a wake that this poll answers must be seen by it, and a wake that comes after
            // must find that the poll has begun.
            this.state.turn.swap(POLLED, Ordering::AcqRel);
            if let Poll::Ready(output) = this.future.as_mut().poll(&mut Context::from_waker(&this.waker)) {
                return Poll::Ready(output);
            }
            let waiting = this.state.turn.compare_exchange(POLLED, WAITING, Ordering::AcqRel, Ordering::Acquire);
            if waiting.is_ok() {
                return Poll::Pending;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Longest wait for what takes microseconds.
    const WAIT: std::time::Duration = std::time::Duration::from_secs(60);

    /// Counts how often the task is woken.
    #[derive(Default)]
    struct Counted(AtomicUsize);

    impl Wake for Counted {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Is ready at the poll after `wakes` that wake itself.
    fn waking_itself(wakes: usize) -> impl Future<Output = usize> {
        let mut polls = 0;
        std::future::poll_fn(move |cx| {
            polls += 1;
            if polls > wakes {
                return Poll::Ready(polls);
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
    }

    /// Polls to the end as a runtime does, only when woken; polls of the task, and what the future returned.
    fn run(wakes: usize) -> (usize, usize) {
        let (counted, mut polls) = (Arc::<Counted>::default(), 0);
        let waker = counted.clone().into();
        let mut task = Again::new(waking_itself(wakes));
        loop {
            assert_eq!(counted.0.load(Ordering::SeqCst), polls, "woken as often as it has to be polled again");
            polls += 1;
            if let Poll::Ready(inner) = Pin::new(&mut task).poll(&mut Context::from_waker(&waker)) {
                return (polls, inner);
            }
        }
    }

    #[test]
    fn a_future_that_wakes_itself_goes_on_within_a_poll_and_not_for_ever() {
        assert_eq!([0, 1, 7, 8, 15, 16].map(run), [(1, 1), (1, 2), (1, 8), (2, 9), (2, 16), (3, 17)]);
    }

    #[test]
    fn wakes_from_elsewhere_are_told_once_a_poll() {
        let counted = Arc::<Counted>::default();
        let waker = counted.clone().into();
        let mut task = Again::new(std::future::pending::<()>());
        for polls in 1..4 {
            assert!(Pin::new(&mut task).poll(&mut Context::from_waker(&waker)).is_pending());
            assert_eq!(counted.0.load(Ordering::SeqCst), polls - 1);
            task.waker.wake_by_ref();
            Waker::wake(task.waker.clone());
            assert_eq!(counted.0.load(Ordering::SeqCst), polls);
        }
    }

    /// Two threads wake, a third polls, and does nothing at a poll but look: no lock orders anything for it. A lost wake would leave
    /// it waiting, and the others for it.
    #[test]
    fn no_wake_is_lost_between_threads() {
        const STEPS: usize = 20_000;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build();
        let runtime = runtime.expect("a runtime");
        let [goals, seen] = [(); 2].map(|()| Arc::new([(); 2].map(|()| AtomicUsize::new(0))));
        let (tell, told) = std::sync::mpsc::channel();
        let (goal, reached) = (goals.clone(), seen.clone());
        let mut tell = Some(tell);
        let waiting = runtime.spawn(Again::new(std::future::poll_fn(move |cx| {
            if let Some(tell) = tell.take() {
                tell.send(cx.waker().clone()).expect("the test listens");
            }
            for (goal, reached) in goal.iter().zip(&*reached) {
                reached.store(goal.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            let at_end = |reached: &AtomicUsize| reached.load(Ordering::Relaxed) == STEPS;
            if reached.iter().all(at_end) { Poll::Ready(()) } else { Poll::Pending }
        })));
        let waker = told.recv_timeout(WAIT).expect("it is polled");
        std::thread::scope(|scope| {
            for own in 0..2 {
                let (goals, seen, waker) = (&goals, &seen, &waker);
                scope.spawn(move || {
                    for step in 1..=STEPS {
                        goals[own].store(step, Ordering::Relaxed);
                        waker.wake_by_ref();
                        let since = std::time::Instant::now();
                        while seen[own].load(Ordering::Relaxed) < step {
                            assert!(since.elapsed() < WAIT, "step {step} was not seen");
                            std::thread::yield_now();
                        }
                    }
                });
            }
        });
        runtime
            .block_on(async { tokio::time::timeout(WAIT, waiting).await })
            .expect("it ends")
            .expect("without a panic");
    }
}
