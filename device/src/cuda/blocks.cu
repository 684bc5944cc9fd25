// Scattered pieces of KV blocks to whole blocks, and back. `cargo xtask ptx` compiles it to blocks.ptx.
//
// Grid: x = block of the list, y = plane; the threads of a block of threads move 16 bytes each at a time.

typedef unsigned long long u64;

struct __align__(16) Piece { u64 low, high; };

// `pieces`: Piece's of a block in one plane. `blocks`: blocks of the arena.
extern "C" __global__ void gather_blocks(Piece* whole, const Piece* arena, const unsigned* ids, u64 pieces, u64 blocks) {
    const u64 planes = gridDim.y;
    const Piece* from = arena + (blockIdx.y * blocks + ids[blockIdx.x]) * pieces;
    Piece* to = whole + (blockIdx.x * planes + blockIdx.y) * pieces;
    for (u64 i = threadIdx.x; i < pieces; i += blockDim.x) to[i] = from[i];
}

extern "C" __global__ void scatter_blocks(Piece* arena, const Piece* whole, const unsigned* ids, u64 pieces, u64 blocks) {
    const u64 planes = gridDim.y;
    const Piece* from = whole + (blockIdx.x * planes + blockIdx.y) * pieces;
    Piece* to = arena + (blockIdx.y * blocks + ids[blockIdx.x]) * pieces;
    for (u64 i = threadIdx.x; i < pieces; i += blockDim.x) to[i] = from[i];
}
