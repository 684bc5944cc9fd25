//! Checks and times copies of KV blocks on every device of this machine; prints one JSON object a line.
//!
//! Carried alone to a machine with an accelerator, it is the whole check: it needs nothing but the driver. Ends with an error
//! when a byte is wrong.

use std::time::Instant;

use device::cuda::{self, Cuda};
use device::{Cpu, Device, DeviceError, Paging};

/// Blocks of 16 tokens of an 8B model (32 layers, 8 KV heads of 128, two bytes), and the same bytes in one plane: the limit.
const PAGED: Paging = Paging { planes: 64, blocks: 512, piece_bytes: 32 << 10 };
const FLAT: Paging = Paging { planes: 1, blocks: 512, piece_bytes: 2 << 20 };
/// Blocks that are copied at once, and how often.
const BLOCKS: u32 = 128;
const ROUNDS: usize = 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    measure(&Cpu::default())?;
    for description in cuda::inventory()? {
        let device = Cuda::open(description)?;
        println!("{}", serde_json::json!({"device": device.describe().name, "free_bytes": device.free_bytes()?}));
        measure(&device)?;
    }
    Ok(())
}

fn measure(device: &dyn Device) -> Result<(), Box<dyn std::error::Error>> {
    let description = device.describe();
    let (paged, flat) = (rates(device, PAGED)?, rates(device, FLAT)?);
    for (copy, gb_s, limit_gb_s) in [("gather", paged.0, flat.0), ("scatter", paged.1, flat.1)] {
        let (name, capability) =
            (&description.name, format!("{}.{}", description.capability.0, description.capability.1));
        println!(
            "{}",
            serde_json::json!({"device": name, "capability": capability, "memory_bytes": description.memory_bytes,
                "copy": copy, "gb_s": gb_s, "limit_gb_s": limit_gb_s})
        );
    }
    Ok(())
}

/// Gather and scatter in GB/s, best of all rounds, after checking that every byte is where it belongs.
fn rates(device: &dyn Device, paging: Paging) -> Result<(f64, f64), DeviceError> {
    let mut arena = device.arena(paging)?;
    // Every third block: neither in order nor side by side.
    let ids: Vec<u32> = (0..BLOCKS).map(|i| (i * 3 + 1) % paging.blocks as u32).rev().collect();
    let bytes = ids.len() * paging.block_bytes();
    let (mut out, mut back) = (device.staging(bytes)?, device.staging(bytes)?);
    out.iter_mut().enumerate().for_each(|(index, byte)| *byte = (index / 16 * 37 + index) as u8);
    let mut best = (f64::MAX, f64::MAX);
    for _ in 0..ROUNDS {
        let started = Instant::now();
        arena.scatter(&ids, &out)?;
        best.1 = best.1.min(started.elapsed().as_secs_f64());
        back.fill(0);
        let started = Instant::now();
        arena.gather(&ids, &mut back)?;
        best.0 = best.0.min(started.elapsed().as_secs_f64());
        assert!(out[..] == back[..], "blocks came back changed on {}", device.describe().name);
    }
    let rate = |seconds: f64| bytes as f64 / seconds / 1e9;
    Ok((rate(best.0), rate(best.1)))
}
