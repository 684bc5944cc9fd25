//! The host as a device: what the CUDA device must do, in the plainest way.

use super::{Aligned, Arena, Description, Device, DeviceError, Paging, Staging, StagingKind, check_once};

/// Host memory.
pub struct Cpu(Description);

impl Default for Cpu {
    fn default() -> Self {
        let name = format!("cpu ({})", std::env::consts::ARCH);
        Self(Description { ordinal: 0, name, uuid: String::new(), memory_bytes: 0, capability: (0, 0) })
    }
}

impl Device for Cpu {
    fn describe(&self) -> &Description {
        &self.0
    }

    fn arena(&self, paging: Paging) -> Result<Box<dyn Arena>, DeviceError> {
        paging.check()?;
        Ok(Box::new(HostArena { paging, bytes: vec![0; paging.bytes()] }))
    }

    fn staging(&self, bytes: usize) -> Result<Staging, DeviceError> {
        Ok(Staging(StagingKind::Plain(Aligned::new(bytes))))
    }
}

struct HostArena {
    paging: Paging,
    bytes: Vec<u8>,
}

impl Arena for HostArena {
    fn paging(&self) -> Paging {
        self.paging
    }

    fn gather(&mut self, blocks: &[u32], into: &mut Staging) -> Result<(), DeviceError> {
        self.paging.check_copy(blocks, into.len())?;
        let piece = self.paging.piece_bytes;
        for (&block, whole) in blocks.iter().zip(into.chunks_exact_mut(self.paging.block_bytes())) {
            for (plane, to) in whole.chunks_exact_mut(piece).enumerate() {
                let from = self.paging.offset(plane, block);
                to.copy_from_slice(&self.bytes[from..from + piece]);
            }
        }
        Ok(())
    }

    fn scatter(&mut self, blocks: &[u32], from: &Staging) -> Result<(), DeviceError> {
        self.paging.check_copy(blocks, from.len())?;
        check_once(blocks, &self.paging)?;
        let piece = self.paging.piece_bytes;
        for (&block, whole) in blocks.iter().zip(from.chunks_exact(self.paging.block_bytes())) {
            for (plane, from) in whole.chunks_exact(piece).enumerate() {
                let to = self.paging.offset(plane, block);
                self.bytes[to..to + piece].copy_from_slice(from);
            }
        }
        Ok(())
    }
}
