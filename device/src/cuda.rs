//! NVIDIA devices through the CUDA driver, which is loaded when it is first asked for and may be missing.
//!
//! The kernels are compiled ahead of time (`blocks.ptx`); the driver turns them into code of the device at hand.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::result::DriverError;
use cudarc::driver::{CudaContext, CudaFunction, CudaSlice, CudaStream, LaunchConfig, PushKernelArg, result, sys};
use cudarc::nvrtc::Ptx;

use super::{Arena, Description, Device, DeviceError, PIECE_ALIGN, Paging, Staging, StagingKind, check_once};

/// Device memory that whole blocks pass through, and so the most bytes that one launch and one copy move.
pub const CHUNK_BYTES: usize = 64 << 20;
/// Threads that move one piece.
const THREADS: u32 = 256;
/// Most planes: the limit of a grid's second dimension.
const MAX_PLANES: usize = 65_535;

/// The kernels.
pub(crate) const PTX: &str = include_str!("cuda/blocks.ptx");
/// What they are made from; `blocks.ptx` says of which version.
#[cfg(test)]
pub(crate) const SOURCE: &str = include_str!("cuda/blocks.cu");

fn failed(stage: &'static str) -> impl FnOnce(DriverError) -> DeviceError {
    move |error| DeviceError::Driver { stage, reason: error.to_string() }
}

/// What devices there are; none where there is no driver. Takes no memory on them.
pub fn inventory() -> Result<Vec<Description>, DeviceError> {
    if !is_there() {
        return Ok(Vec::new());
    }
    match result::init() {
        Ok(()) => {}
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => return Ok(Vec::new()),
        Err(error) => return Err(failed("starting the CUDA driver")(error)),
    }
    let count = result::device::get_count().map_err(failed("counting CUDA devices"))?;
    (0..count).map(|ordinal| describe(ordinal).map_err(failed("describing a CUDA device"))).collect()
}

/// Whether there is a driver to be asked.
#[cfg(not(feature = "linked"))]
fn is_there() -> bool {
    // SAFETY: it only opens the library, whose initializers run in every process that uses CUDA.
    unsafe { sys::is_culib_present() }
}

/// Without a driver the program would not have started.
#[cfg(feature = "linked")]
fn is_there() -> bool {
    true
}

fn describe(ordinal: i32) -> Result<Description, DriverError> {
    use sys::CUdevice_attribute_enum::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    };
    let device = result::device::get(ordinal)?;
    let uuid = result::device::get_uuid(device)?.bytes.map(|byte| format!("{byte:02x}", byte = byte as u8)).concat();
    // SAFETY: the device was just given to us.
    let (memory, major, minor) = unsafe {
        (
            result::device::total_mem(device)?,
            result::device::get_attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            result::device::get_attribute(device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        )
    };
    Ok(Description {
        ordinal: ordinal as usize,
        name: result::device::get_name(device)?,
        uuid,
        memory_bytes: memory as u64,
        capability: (major as u32, minor as u32),
    })
}

/// One CUDA device, with a context and the kernels.
pub struct Cuda {
    description: Description,
    context: Arc<CudaContext>,
    gather: CudaFunction,
    scatter: CudaFunction,
}

impl Cuda {
    /// Opens a device of the [`inventory`]. Its context takes some hundred megabytes of the device's memory.
    pub fn open(description: Description) -> Result<Self, DeviceError> {
        let context = CudaContext::new(description.ordinal).map_err(failed("making a CUDA context"))?;
        let module = context.load_module(Ptx::from_src(PTX)).map_err(failed("loading the CUDA kernels"))?;
        let kernel = |name| module.load_function(name).map_err(failed("finding a CUDA kernel"));
        let (gather, scatter) = (kernel("gather_blocks")?, kernel("scatter_blocks")?);
        Ok(Self { description, context, gather, scatter })
    }

    /// Bytes of the device's memory that are free now.
    pub fn free_bytes(&self) -> Result<u64, DeviceError> {
        let (free, _) = self.context.mem_get_info().map_err(failed("asking for free device memory"))?;
        Ok(free as u64)
    }
}

impl Device for Cuda {
    fn describe(&self) -> &Description {
        &self.description
    }

    fn arena(&self, paging: Paging) -> Result<Box<dyn Arena>, DeviceError> {
        paging.check()?;
        if paging.planes > MAX_PLANES {
            return Err(DeviceError::Paging(paging));
        }
        // A stream of its own: copies of blocks neither wait for the engine's work nor hold it up.
        let stream = self.context.new_stream().map_err(failed("making a CUDA stream"))?;
        let blocks = stream.alloc_zeros(paging.bytes()).map_err(failed("taking device memory for KV blocks"))?;
        let at_once = (CHUNK_BYTES / paging.block_bytes()).clamp(1, paging.blocks);
        let whole = stream
            .alloc_zeros(at_once * paging.block_bytes())
            .map_err(failed("taking device memory for copies of KV blocks"))?;
        let kernels = (self.gather.clone(), self.scatter.clone());
        stream.synchronize().map_err(failed("clearing device memory"))?;
        Ok(Box::new(CudaArena { paging, stream, blocks, whole, at_once, kernels }))
    }

    fn staging(&self, bytes: usize) -> Result<Staging, DeviceError> {
        Ok(Staging(StagingKind::Pinned(Pinned::new(self.context.clone(), bytes)?)))
    }
}

struct CudaArena {
    paging: Paging,
    stream: Arc<CudaStream>,
    blocks: CudaSlice<u8>,
    /// Whole blocks on their way.
    whole: CudaSlice<u8>,
    /// How many blocks that are.
    at_once: usize,
    /// Gather and scatter.
    kernels: (CudaFunction, CudaFunction),
}

impl CudaArena {
    /// Runs one of the kernels over `ids`, which are checked.
    fn launch(&mut self, gather: bool, ids: &[u32]) -> Result<(), DriverError> {
        let list = self.stream.clone_htod(ids)?;
        let config = LaunchConfig {
            grid_dim: (ids.len() as u32, self.paging.planes as u32, 1),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: 0,
        };
        let (pieces, blocks) = ((self.paging.piece_bytes / PIECE_ALIGN) as u64, self.paging.blocks as u64);
        let kernel = if gather { &self.kernels.0 } else { &self.kernels.1 };
        let mut launch = self.stream.launch_builder(kernel);
        if gather {
            launch.arg(&mut self.whole).arg(&self.blocks);
        } else {
            launch.arg(&mut self.blocks).arg(&self.whole);
        }
        launch.arg(&list).arg(&pieces).arg(&blocks);
        // SAFETY: the arguments are those of the kernels, in their order. Every id is below `blocks`, `ids` are at most as many
        // as `whole` has room for, and both buffers have `planes × pieces` for each block.
        unsafe { launch.launch(config) }.map(drop)
    }
}

impl Arena for CudaArena {
    fn paging(&self) -> Paging {
        self.paging
    }

    fn gather(&mut self, blocks: &[u32], into: &mut Staging) -> Result<(), DeviceError> {
        self.paging.check_copy(blocks, into.len())?;
        let block_bytes = self.paging.block_bytes();
        for (ids, host) in blocks.chunks(self.at_once).zip(into.chunks_mut(self.at_once * block_bytes)) {
            self.launch(true, ids).map_err(failed("collecting KV blocks"))?;
            let bytes = ids.len() * block_bytes;
            let copied = self.stream.memcpy_dtoh(&self.whole.slice(..bytes), &mut host[..bytes]);
            copied.map_err(failed("copying KV blocks to the host"))?;
            self.stream.synchronize().map_err(failed("waiting for KV blocks on the host"))?;
        }
        Ok(())
    }

    fn scatter(&mut self, blocks: &[u32], from: &Staging) -> Result<(), DeviceError> {
        self.paging.check_copy(blocks, from.len())?;
        check_once(blocks, &self.paging)?;
        let block_bytes = self.paging.block_bytes();
        for (ids, host) in blocks.chunks(self.at_once).zip(from.chunks(self.at_once * block_bytes)) {
            let bytes = ids.len() * block_bytes;
            let copied = self.stream.memcpy_htod(&host[..bytes], &mut self.whole.slice_mut(..bytes));
            copied.map_err(failed("copying KV blocks to the device"))?;
            self.launch(false, ids).map_err(failed("placing KV blocks"))?;
            self.stream.synchronize().map_err(failed("waiting for KV blocks on the device"))?;
        }
        Ok(())
    }
}

/// Page-locked host memory. Ordinary caching, unlike cudarc's own: the host reads what a device has written.
pub(crate) struct Pinned {
    context: Arc<CudaContext>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: it is memory that this value alone owns.
unsafe impl Send for Pinned {}
// SAFETY: shared references only read it.
unsafe impl Sync for Pinned {}

impl Pinned {
    fn new(context: Arc<CudaContext>, bytes: usize) -> Result<Self, DeviceError> {
        let failed = failed("taking page-locked host memory");
        let take = || {
            context.bind_to_thread()?;
            // SAFETY: the context is bound; a driver never gives zero bytes, so one is asked for.
            let start = unsafe { result::malloc_host(bytes.max(1), 0)? }.cast::<u8>();
            // SAFETY: the memory is ours, and so long.
            unsafe { start.write_bytes(0, bytes) };
            Ok(start)
        };
        let start = take().map_err(failed)?;
        Ok(Self { context, start, bytes })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: written in full when it was taken, and ours until it is dropped.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed by nobody else.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Nobody can be told here; a context that is broken takes its memory with it.
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: the driver gave it, and it is given back once.
            let _ = unsafe { result::free_host(self.start.cast::<c_void>()) };
        }
    }
}
