//! Copies between host memory and the tensors' device, through memory that the device copies to and from at full speed.
//!
//! The memory is one buffer, used again for every copy; so each copy is waited for. It grows to the largest copy there was.

use candle_core::{Device, Storage, Tensor};
use half::f16;

use device::Staging;

/// The buffer and both its ends.
pub(super) struct Carrier {
    device: Device,
    /// The same device, as it gives memory.
    host: Box<dyn device::Device>,
    staging: Staging,
}

impl Carrier {
    pub(super) fn new(device: Device, host: Box<dyn device::Device>) -> Result<Self, device::DeviceError> {
        let staging = host.staging(0)?;
        Ok(Self { device, host, staging })
    }

    /// A new tensor of `dims` halves on the device, which `fill` writes as bytes.
    pub(super) fn up(&mut self, dims: &[usize], fill: impl FnOnce(&mut [u8])) -> candle_core::Result<Tensor> {
        let count = dims.iter().product();
        self.make_room(count)?;
        fill(&mut self.staging[..count * size_of::<f16>()]);
        let tensor = Tensor::from_slice(&halves(&self.staging)[..count], dims, &self.device)?;
        // From page-locked memory the copy goes on by itself.
        self.device.synchronize()?;
        Ok(tensor)
    }

    /// The elements of a contiguous tensor of halves, in order.
    pub(super) fn down(&mut self, tensor: &Tensor) -> candle_core::Result<&[f16]> {
        let count = tensor.elem_count();
        self.make_room(count)?;
        let (storage, layout) = tensor.storage_and_layout();
        let Some((start, end)) = layout.contiguous_offsets() else {
            candle_core::bail!("only contiguous tensors are copied to the host");
        };
        let to = &mut halves_mut(&mut self.staging)[..count];
        match &*storage {
            Storage::Cpu(from) => to.copy_from_slice(&from.as_slice::<f16>()?[start..end]),
            #[cfg(feature = "cuda")]
            Storage::Cuda(from) => {
                let from = from.as_cuda_slice::<f16>()?.slice(start..end);
                let stream = self.device.as_cuda_device()?.cuda_stream();
                stream.memcpy_dtoh(&from, to).map_err(candle_core::Error::wrap)?;
                self.device.synchronize()?;
            }
            _ => candle_core::bail!("tensors of {:?} are not copied to the host", self.device),
        }
        Ok(&halves(&self.staging)[..count])
    }

    fn make_room(&mut self, halves: usize) -> candle_core::Result<()> {
        let bytes = halves * size_of::<f16>();
        if self.staging.len() < bytes {
            self.staging = self.host.staging(bytes.next_power_of_two()).map_err(candle_core::Error::wrap)?;
        }
        Ok(())
    }
}

fn halves(bytes: &[u8]) -> &[f16] {
    // SAFETY: all bits are halves.
    let (before, halves, _) = unsafe { bytes.align_to() };
    assert!(before.is_empty(), "staging memory is aligned");
    halves
}

fn halves_mut(bytes: &mut [u8]) -> &mut [f16] {
    // SAFETY: all bits are halves, and all halves bytes.
    let (before, halves, _) = unsafe { bytes.align_to_mut() };
    assert!(before.is_empty(), "staging memory is aligned");
    halves
}
