// Runs the kernel of bulk.cu on the host: lanes are threads, and the asynchronous copies behave as badly as they may.
// A copy in takes place at once (so that a stage which is filled too early loses its bytes) or when its barrier is
// waited for; a copy out, and a fetch of a list entry, when its lane has to wait for it, and not before.

#include <atomic>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

struct Three { unsigned x; };
thread_local Three threadIdx, blockIdx, gridDim;
static std::barrier<>* lanes;
static std::atomic<unsigned> sum[2];
thread_local unsigned turn;

#define HOST_TEST
#define DYNAMIC_SHARED extern
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __shared__ static
#define __syncwarp() lanes->arrive_and_wait()
#define __ldg(p) (*(p))
static inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  std::atomic<unsigned>& total = sum[turn++ % 2];
  total += value;
  lanes->arrive_and_wait();
  unsigned result = total;
  lanes->arrive_and_wait();
  if (threadIdx.x % 32 == 0) total = 0;
  lanes->arrive_and_wait();
  return result;
}

alignas(128) unsigned char memory[1 << 20];
static bool late;
typedef unsigned long long u64_;
struct State { int arrivals = 1; long expected = 0; unsigned phase = 0; std::deque<std::function<void()>> waiting; };
static std::mutex lock;
static State states[64];
static u64_* first_barrier;
static State& state_of(u64_* barrier) { return states[barrier - first_barrier]; }
static void settle(State& state) {
  if (state.arrivals == 0 && state.expected == 0) { state.arrivals = 1; state.phase ^= 1; }
}
static void barrier_make(u64_* barrier) {
  if (!first_barrier || barrier < first_barrier) first_barrier = barrier;
  state_of(barrier) = State();
}
static void barriers_made() {}
static void barrier_expect(u64_* barrier, unsigned bytes) {
  std::lock_guard<std::mutex> hold(lock);
  State& state = state_of(barrier);
  state.arrivals--;
  state.expected += bytes;
  settle(state);
}
static void barrier_wait(u64_* barrier, unsigned parity) {
  while (true) {
    {
      std::lock_guard<std::mutex> hold(lock);
      State& state = state_of(barrier);
      if (state.phase != parity) return;
      if (!state.waiting.empty()) { state.waiting.front()(); state.waiting.pop_front(); continue; }
    }
    std::this_thread::yield();
  }
}
static void copy_in(void* room, u64_ from, unsigned bytes, u64_* barrier) {
  std::lock_guard<std::mutex> hold(lock);
  State& state = state_of(barrier);
  if ((from | (u64_)room | bytes) % 16) { std::puts("a piece is not aligned"); std::exit(1); }
  auto copy = [=, &state] {
    std::memcpy(room, (void*)from, bytes);
    state.expected -= bytes;
    settle(state);
  };
  if (late) state.waiting.push_back(copy); else copy();
}
struct Out { u64_ to; void* room; unsigned bytes; };
thread_local std::vector<Out> open_group;
thread_local std::deque<std::vector<Out>> groups;
static void copy_out(u64_ to, void* room, unsigned bytes) { open_group.push_back({to, room, bytes}); }
static void close_group() { groups.push_back(std::move(open_group)); open_group.clear(); }
static void let_out(size_t pending) {
  while (groups.size() > pending) {
    for (Out& out : groups.front()) std::memcpy((void*)out.to, out.room, out.bytes);
    groups.pop_front();
  }
}
template <int PENDING> static void wait_read() { let_out(PENDING); }
static void wait_written() { let_out(0); }

struct Fetch { u64_* slot; const u64_* entry; };
thread_local std::vector<Fetch> open_fetch;
thread_local std::deque<std::vector<Fetch>> fetches;
static void fetch(u64_* slot, const u64_* entry) { open_fetch.push_back({slot, entry}); }
static void close_fetch() { fetches.push_back(std::move(open_fetch)); open_fetch.clear(); }
template <int PENDING> static void wait_fetched() {
  while (fetches.size() > PENDING) {
    for (Fetch& one : fetches.front()) *one.slot = *one.entry;
    fetches.pop_front();
  }
}

#include SOURCE

// argv: blocks late length runs parts part_bytes group; stdin: size, source bytes, destination bytes, lists.
int main(int argc, char** argv) {
  unsigned blocks = atoi(argv[1]);
  late = atoi(argv[2]);
  u64_ length = atoll(argv[3]);
  unsigned runs = atoi(argv[4]), parts = atoi(argv[5]), part_bytes = atoi(argv[6]), group = atoi(argv[7]);
  u64_ size;
  if (fread(&size, 8, 1, stdin) != 1) return 2;
  unsigned char* source = (unsigned char*)aligned_alloc(128, (size + 127) / 128 * 128);
  unsigned char* destination = (unsigned char*)aligned_alloc(128, (size + 127) / 128 * 128);
  std::vector<u64_> lists((length ? 2 : 3) * (size_t)runs);
  if (fread(source, 1, size, stdin) != size || fread(destination, 1, size, stdin) != size) return 2;
  if (fread(lists.data(), 8, lists.size(), stdin) != lists.size()) return 2;
  for (unsigned block = 0; block < blocks; block++)
    for (unsigned warp = 0; warp < WARPS; warp++) {
      std::barrier<> all(32);
      lanes = &all;
      sum[0] = sum[1] = 0;
      std::vector<std::thread> threads;
      for (unsigned lane = 0; lane < 32; lane++)
        threads.emplace_back([=, &lists] {
          threadIdx.x = 32 * warp + lane, blockIdx.x = block, gridDim.x = blocks;
          move_bulk((u64_)source, (u64_)destination, lists.data(), length, runs, parts, part_bytes, group);
        });
      for (std::thread& thread : threads) thread.join();
    }
  fwrite(destination, 1, size, stdout);
}
