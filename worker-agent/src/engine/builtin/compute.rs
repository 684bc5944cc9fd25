//! What the built-in engine computes on, as a flag says it, and whether this program was built for it.

use std::fmt;
use std::str::FromStr;

/// What a model computes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compute {
    /// The processor, with kernels of our own.
    #[default]
    Cpu,
    /// The processor, with candle's: slower. What a GPU would compute, checked without one.
    CandleCpu,
    /// The CUDA device of this number.
    Cuda(usize),
}

/// This program cannot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--device {compute} needs a program that was built for it (cargo build --features {feature})")]
pub struct NotBuilt {
    compute: Compute,
    feature: &'static str,
}

impl Compute {
    /// Whether this program can.
    pub fn check(self) -> Result<(), NotBuilt> {
        let (feature, built) = match self {
            Self::Cpu => return Ok(()),
            Self::CandleCpu => ("candle", cfg!(feature = "candle")),
            Self::Cuda(_) => ("cuda", cfg!(feature = "cuda")),
        };
        if built { Ok(()) } else { Err(NotBuilt { compute: self, feature }) }
    }
}

impl FromStr for Compute {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let rule = "must be cpu, cuda, cuda:NUMBER or candle-cpu";
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "candle-cpu" => Ok(Self::CandleCpu),
            None if text == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", number)) => number.parse().map(Self::Cuda).map_err(|_| rule),
            _ => Err(rule),
        }
    }
}

/// As it is parsed.
impl fmt::Display for Compute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::CandleCpu => f.write_str("candle-cpu"),
            Self::Cuda(0) => f.write_str("cuda"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_what_is_read() {
        for compute in [Compute::Cpu, Compute::CandleCpu, Compute::Cuda(0), Compute::Cuda(7)] {
            assert_eq!(compute.to_string().parse(), Ok(compute));
        }
        for wrong in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "CPU"] {
            assert!(wrong.parse::<Compute>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_program_says_what_it_was_not_built_for() {
        assert_eq!(Compute::Cpu.check(), Ok(()));
        let refused = Compute::Cuda(1).check();
        assert_eq!(refused.is_ok(), cfg!(feature = "cuda"));
        if let Err(refused) = refused {
            let line = "--device cuda:1 needs a program that was built for it (cargo build --features cuda)";
            assert_eq!(refused.to_string(), line);
        }
    }
}
