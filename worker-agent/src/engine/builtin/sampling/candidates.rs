//! The tokens a draw chooses from, with their weights, and the filters that narrow them.

use std::cmp::Ordering;

/// Tokens whose weight is under e⁻³⁰ ≈ 1e-13 of the best one's are left out: all of a 100k vocabulary together weigh less
/// than a draw of 53 bits from an f32 softmax can resolve.
const NEGLIGIBLE: f32 = -30.0;

/// How many of the best tokens top-p looks at first, and by how much more each time they do not suffice.
const TOP_P_FIRST: usize = 64;
const TOP_P_GROWTH: usize = 8;

#[derive(Clone, Copy, Debug)]
struct Candidate {
    /// e^((logit − best logit) / temperature): in (0, 1], the best token's being 1.
    weight: f32,
    token: u32,
}

impl Candidate {
    /// Heavier first, then the smaller token: a total order, so that ties are cut the same way every time.
    fn rank(&self, other: &Self) -> Ordering {
        other.weight.total_cmp(&self.weight).then(self.token.cmp(&other.token))
    }
}

/// Candidates of one draw; never empty.
pub(super) struct Candidates(Vec<Candidate>);

impl Candidates {
    /// Every token that has a chance; `None` when no logit is a number above −∞.
    pub(super) fn softmax(row: &[f32], temperature: f32) -> Option<Self> {
        let max = row.iter().fold(f32::NEG_INFINITY, |max, &x| if x > max { x } else { max });
        if max == f32::NEG_INFINITY {
            return None;
        }
        let candidates = (0u32..).zip(row).filter_map(|(token, &logit)| {
            // Infinity minus itself is NaN, but the best token's distance to itself is zero.
            let scaled = if logit == max { 0.0 } else { (logit - max) / temperature };
            (scaled > NEGLIGIBLE).then(|| Candidate { weight: scaled.exp(), token })
        });
        Some(Self(candidates.collect()))
    }

    /// Keeps tokens at least `min_p` times as likely as the best one.
    pub(super) fn min_p(&mut self, min_p: f32) {
        if min_p > 0.0 {
            self.0.retain(|c| c.weight >= min_p);
        }
    }

    /// Keeps the `k` best tokens.
    pub(super) fn top_k(&mut self, k: usize) {
        if k < self.0.len() {
            self.0.select_nth_unstable_by(k, Candidate::rank);
            self.0.truncate(k);
        }
    }

    /// Keeps the fewest best tokens that together have at least `p` of the probability.
    pub(super) fn top_p(&mut self, p: f32) {
        let wanted = total(&self.0) * f64::from(p);
        let mut n = TOP_P_FIRST;
        while n < self.0.len() {
            self.0.select_nth_unstable_by(n, Candidate::rank);
            if total(&self.0[..n]) >= wanted {
                self.0.truncate(n);
                break;
            }
            n *= TOP_P_GROWTH;
        }
        self.0.sort_unstable_by(Candidate::rank);
        let mut sum = 0.0;
        let cut = self.0.iter().position(|c| {
            sum += f64::from(c.weight);
            sum >= wanted
        });
        // Rounding may keep the sum below the total: then all of them are needed.
        self.0.truncate(cut.map_or(self.0.len(), |last| last + 1));
    }

    /// The candidate at `u` of the cumulated probability, `u` in [0, 1).
    pub(super) fn pick(&self, u: f64) -> u32 {
        let mut left = u * total(&self.0);
        for candidate in &self.0 {
            left -= f64::from(candidate.weight);
            if left < 0.0 {
                return candidate.token;
            }
        }
        self.0.last().expect("never empty").token
    }

    #[cfg(test)]
    pub(super) fn tokens(&self) -> Vec<u32> {
        let mut tokens: Vec<u32> = self.0.iter().map(|c| c.token).collect();
        tokens.sort_unstable();
        tokens
    }
}

fn total(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|c| f64::from(c.weight)).sum()
}
