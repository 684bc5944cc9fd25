//! One suite for every device: on machines without an accelerator for the host alone.

use proptest::prelude::*;

use super::*;

/// The host, and every CUDA device there is.
fn devices() -> Vec<Box<dyn Device>> {
    let cuda = cuda::inventory().expect("a driver that works, or none");
    let open = |description| Box::new(cuda::Cuda::open(description).expect("opened")) as Box<dyn Device>;
    std::iter::once(Box::new(Cpu::default()) as Box<dyn Device>).chain(cuda.into_iter().map(open)).collect()
}

/// Bytes that say where they belong.
fn mark(block: u32, index: usize) -> u8 {
    (block as usize * 31 + index * 7 + 1) as u8
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn blocks_come_back_whole(
        planes in 1_usize..5,
        blocks in 1_usize..40,
        piece in 1_usize..9,
        order in prop::collection::vec(any::<prop::sample::Index>(), 1..40),
    ) {
        let paging = Paging { planes, blocks, piece_bytes: piece * PIECE_ALIGN };
        let mut ids: Vec<u32> = order.iter().map(|index| index.index(blocks) as u32).collect();
        ids.sort_unstable();
        ids.dedup();
        ids.reverse();
        for device in devices() {
            let mut arena = device.arena(paging).expect("room");
            let size = paging.block_bytes();
            let mut written = device.staging(ids.len() * size).expect("room");
            for (&block, whole) in ids.iter().zip(written.chunks_exact_mut(size)) {
                whole.iter_mut().enumerate().for_each(|(index, byte)| *byte = mark(block, index));
            }
            arena.scatter(&ids, &written).expect("copied");
            // All of them, in the arena's order: what was not written is zero still.
            let all: Vec<u32> = (0..blocks as u32).collect();
            let mut read = device.staging(paging.bytes()).expect("room");
            arena.gather(&all, &mut read).expect("copied");
            for (&block, whole) in all.iter().zip(read.chunks_exact(size)) {
                let known = ids.contains(&block);
                for (index, &byte) in whole.iter().enumerate() {
                    let expected = if known { mark(block, index) } else { 0 };
                    prop_assert_eq!(byte, expected, "{} block {} byte {}", device.describe().name, block, index);
                }
            }
        }
    }
}

/// A piece of a plane is where paged attention looks for it: a scatter of one block touches one run in each plane.
#[test]
fn pieces_lie_plane_by_plane() {
    let paging = Paging { planes: 3, blocks: 4, piece_bytes: 32 };
    assert_eq!((paging.block_bytes(), paging.bytes()), (96, 384));
    assert_eq!([0, 1, 2].map(|plane| paging.offset(plane, 2)), [64, 192, 320]);
}

#[test]
fn what_cannot_be_copied_is_refused_and_changes_nothing() {
    let paging = Paging { planes: 2, blocks: 4, piece_bytes: 16 };
    for device in devices() {
        let mut arena = device.arena(paging).expect("room");
        let mut small = device.staging(paging.block_bytes() * 2 - 1).expect("room");
        assert_eq!((small.as_ptr() as usize % PIECE_ALIGN, small.len()), (0, 63));
        small.fill(9);
        let missing = DeviceError::NoSuchBlock { block: 4, blocks: 4 };
        assert_eq!(arena.scatter(&[4], &small), Err(missing.clone()));
        assert_eq!(arena.gather(&[0, 4], &mut small), Err(missing));
        assert_eq!(arena.scatter(&[0, 1], &small), Err(DeviceError::Staging { needed: 64, room: 63 }));
        let two = device.staging(2 * paging.block_bytes()).expect("room");
        assert_eq!(arena.scatter(&[3, 3], &two), Err(DeviceError::Twice(3)));
        let mut all = device.staging(paging.bytes()).expect("room");
        arena.gather(&[0, 1, 2, 3], &mut all).expect("copied");
        assert!(all.iter().all(|byte| *byte == 0));
        arena.gather(&[], &mut all).expect("nothing to do");
        for (planes, blocks, piece_bytes) in [(0, 1, 16), (1, 0, 16), (1, 1, 0), (1, 1, 24), (usize::MAX, 2, 16)] {
            let bad = Paging { planes, blocks, piece_bytes };
            assert_eq!(device.arena(bad).map(drop), Err(DeviceError::Paging(bad)));
        }
    }
}

/// More than passes through the device's buffer at once.
#[test]
fn long_lists_are_copied_in_parts() {
    let paging = Paging { planes: 2, blocks: 96, piece_bytes: 1 << 19 };
    assert!(paging.bytes() > cuda::CHUNK_BYTES);
    for device in devices() {
        let mut arena = device.arena(paging).expect("room");
        let size = paging.block_bytes();
        let ids: Vec<u32> = (0..96).rev().collect();
        let mut whole = device.staging(paging.bytes()).expect("room");
        for (&block, bytes) in ids.iter().zip(whole.chunks_exact_mut(size)) {
            bytes.fill(block as u8 + 1);
        }
        arena.scatter(&ids, &whole).expect("copied");
        whole.fill(0);
        arena.gather(&ids, &mut whole).expect("copied");
        assert!(ids.iter().zip(whole.chunks_exact(size)).all(|(&id, b)| b.iter().all(|byte| *byte == id as u8 + 1)));
    }
}

#[test]
fn the_kernels_are_compiled_from_their_source() {
    let stamp = cuda::PTX.lines().next().expect("a first line");
    assert_eq!(stamp, format!("// blocks.cu {:016x}", fnv1a(cuda::SOURCE.as_bytes())), "run cargo xtask ptx");
    for kernel in ["gather_blocks", "scatter_blocks"] {
        assert!(cuda::PTX.contains(&format!(".entry {kernel}(")), "{kernel}");
    }
}

/// 64-bit FNV-1a, as the compiler script computes it.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}
