// Moves runs of bytes through shared memory with the bulk copy unit of each multiprocessor (compute capability 9.0 and
// later; PTX ISA, cp.async.bulk). One lane starts the copy of one piece, a run or a part of it, with one instruction
// each way, so a run costs the same whether it has 1 KiB or 4, and no register holds any of its bytes.
//
// Each warp works alone. It owns a ring of STAGES stages of STAGE_BYTES, each with a barrier that counts the bytes that
// arrive. A step fills one stage with up to `group` pieces; AHEAD steps are on their way in before the first goes out.
// A stage is filled again when its lanes' copies out of it have been read; every lane refills only what it has emptied.
// The list entries of a step are on their way for LOOK steps before they are needed.
//
// Compiled at run time (`bulk.py`), and by tests for the host with the PTX of this file replaced.

#ifndef WARPS
#define WARPS 4
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef STAGE_BYTES
#define STAGE_BYTES 4096
#endif
#ifndef AHEAD
#define AHEAD (STAGES - 1)
#endif

#define LOOK 4
#define LANES 16  // most pieces in a stage: runs are of 256 bytes and more

typedef unsigned long long u64;
typedef unsigned int u32;

#ifndef HOST_TEST
#define DYNAMIC_SHARED extern __shared__ __align__(128)

__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ void barrier_make(u64* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}\n" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void copy_in(void* room, u64 from, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(room)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void copy_out(u64 to, void* room, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(room)),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void close_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Returns when all but the newest PENDING groups of this lane have been read from shared memory.
template <int PENDING>
__device__ __forceinline__ void wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void fetch(u64* slot, const u64* entry) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(slot)), "l"(entry) : "memory");
}

__device__ __forceinline__ void close_fetch() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns when all but the newest PENDING closed fetches of this lane have arrived.
template <int PENDING>
__device__ __forceinline__ void wait_fetched() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
#endif

// Which piece a lane has in a step: number `step * group + lane`. `run` is `runs` when there is none.
struct Place {
  u32 run;
  u64 inside;
};

__device__ __forceinline__ Place place_of(u32 step, u32 lane, u32 runs, u32 parts, u32 part_bytes, u32 group) {
  Place place = {step * group + lane, 0};
  if (parts > 1) {
    u32 run = place.run / parts;
    place.inside = (u64)(place.run - run * parts) * part_bytes;
    place.run = run;
  }
  if (lane >= group || place.run > runs) place.run = runs;
  return place;
}

// lists: `runs` source offsets, as many destination offsets, and, when `length` is 0, as many lengths; in bytes.
// part_bytes: longest piece, a multiple of 16; parts: pieces of the longest run; group * part_bytes <= STAGE_BYTES.
// All offsets and lengths are multiples of 16, and runs * parts, a whole group added, fits 32 bits.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    move_bulk(u64 source, u64 destination, const u64* lists, u64 length, u32 runs, u32 parts, u32 part_bytes,
              u32 group) {
  DYNAMIC_SHARED unsigned char memory[];
  __shared__ u64 barriers[WARPS * STAGES];
  __shared__ u64 entry_of[WARPS * LOOK * 3 * LANES];
  __shared__ u64 to_of[WARPS * STAGES * LANES];
  __shared__ u32 bytes_of[WARPS * STAGES * LANES];
  const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, slot = lane % LANES;
  unsigned char* room = memory + warp * (STAGES * STAGE_BYTES) + lane * part_bytes;
  u64* full = barriers + warp * STAGES;
  u64* entry = entry_of + warp * (LOOK * 3 * LANES) + slot;
  u64* to = to_of + warp * (STAGES * LANES) + slot;
  u32* bytes = bytes_of + warp * (STAGES * LANES) + slot;
  if (lane == 0) {
    for (int stage = 0; stage < STAGES; stage++) barrier_make(full + stage);
    barriers_made();
  }
  __syncwarp();

  const u32 steps = (runs * parts + group - 1) / group;
  const u32 stride = gridDim.x * WARPS, first = blockIdx.x + gridDim.x * warp;
  const u32 count = first < steps ? (steps - first + stride - 1) / stride : 0;

  auto look = [&](u32 step) {
    if (step < count) {
      const Place place = place_of(first + step * stride, lane, runs, parts, part_bytes, group);
      if (place.run < runs) {
        u64* room = entry + step % LOOK * (3 * LANES);
        fetch(room, lists + place.run);
        fetch(room + LANES, lists + (u64)runs + place.run);
        if (!length) fetch(room + 2 * LANES, lists + 2 * (u64)runs + place.run);
      }
    }
    close_fetch();
  };

  auto start = [&](u32 step) {
    const u32 stage = step % STAGES;
    const Place place = place_of(first + step * stride, lane, runs, parts, part_bytes, group);
    wait_fetched<LOOK - 1>();
    const u64* found = entry + step % LOOK * (3 * LANES);
    u32 size = 0;
    u64 from = 0;
    if (place.run < runs) {
      const u64 whole = length ? length : found[2 * LANES];
      if (place.inside < whole) size = whole - place.inside < part_bytes ? (u32)(whole - place.inside) : part_bytes;
      from = source + found[0] + place.inside;
      to[stage * LANES] = destination + found[LANES] + place.inside;
      bytes[stage * LANES] = size;
    }
    look(step + LOOK);
    const u32 total = __reduce_add_sync(0xffffffffu, size);
    if (lane == 0) barrier_expect(full + stage, total);
    if (size) copy_in(room + stage * STAGE_BYTES, from, size, full + stage);
  };

  for (u32 step = 0; step < LOOK; step++) look(step);
  u32 started = 0;
  while (started < count && started < AHEAD) start(started++);
  for (u32 step = 0; step < count; step++) {
    const u32 stage = step % STAGES;
    barrier_wait(full + stage, (step / STAGES) & 1);
    __syncwarp();
    const Place place = place_of(first + step * stride, lane, runs, parts, part_bytes, group);
    const u32 size = place.run < runs ? bytes[stage * LANES] : 0;
    if (size) copy_out(to[stage * LANES], room + stage * STAGE_BYTES, size);
    close_group();
    if (started < count) {
      wait_read<STAGES - AHEAD>();
      __syncwarp();
      start(started++);
    }
  }
  wait_written();
}
