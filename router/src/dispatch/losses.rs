//! How many workers one request may outlive.
//!
//! A request may be what kills the workers that it is sent to. Whoever is lost while it has the request counts, whether its
//! answer had begun or not, so that a poisonous one takes a few workers with it and not all of them.

/// Workers that were lost with a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Losses {
    count: u32,
    /// With one more than these the request ends.
    most: u32,
}

impl Losses {
    /// None so far. A request outlives as many as it may move (`--migration-limit`), and one in any case: workers die of other things.
    pub(super) fn new(migration_limit: u32) -> Self {
        Self { count: 0, most: migration_limit.max(1) }
    }

    /// Another worker was lost: whether the request may go to one more.
    pub(super) fn outlives_another(&mut self) -> bool {
        self.count = self.count.saturating_add(1);
        self.count <= self.most
    }

    /// Whether the request has ended with the last one.
    pub(super) fn is_over(self) -> bool {
        self.count > self.most
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_outlives_as_many_workers_as_it_may_move_and_one_in_any_case() {
        for (limit, workers) in [(0, 1), (1, 1), (3, 3)] {
            let mut losses = Losses::new(limit);
            assert!((0..workers).all(|_| losses.outlives_another()) && !losses.is_over());
            assert!(!losses.outlives_another() && losses.is_over());
        }
    }
}
