// Splitting work over threads. Long rows are cut into blocks whose number depends on the length alone, and partial
// results are added in order: the answer does not depend on how many threads there are.
#pragma once
#include "simd.h"

// Runs body(context, i) for i in [0, count) on at most `threads` threads; defined once for all instruction sets.
extern "C" __attribute__((visibility("hidden"))) void khot_parallel(int threads, int64_t count, void (*body)(void*, int64_t), void* context);

namespace {

constexpr int64_t kBlock = 16384, kMostBlocks = 256;

struct Empty { void add(const Empty&) {} };

inline int64_t block_size(int64_t n) {
  int64_t even = (n + kMostBlocks - 1) / kMostBlocks;
  return most(kBlock, (even + 63) / 64 * 64);
}

// fn(begin, size) over the blocks of [0, n), results added in the order of the blocks.
template <class R, class Fn> R reduce_blocks(int threads, int64_t n, const Fn& fn) {
  if (n <= kBlock) return fn(int64_t(0), n);
  struct Context { const Fn* fn; int64_t n, size; R part[kMostBlocks]; };
  Context context;
  context.fn = &fn, context.n = n, context.size = block_size(n);
  int64_t blocks = (n + context.size - 1) / context.size;
  auto body = [](void* p, int64_t b) {
    Context& c = *static_cast<Context*>(p);
    c.part[b] = (*c.fn)(b * c.size, least(c.size, c.n - b * c.size));
  };
  if (threads > 1) khot_parallel(threads, blocks, body, &context);
  else for (int64_t b = 0; b < blocks; b++) body(&context, b);
  R sum = context.part[0];
  for (int64_t b = 1; b < blocks; b++) sum.add(context.part[b]);
  return sum;
}

constexpr int64_t kGrain = 8192;  // scores that are worth a thread

inline int team_for(int threads, int64_t rows, int64_t n) {
  int64_t worth = rows * n / kGrain;
  return int(least<int64_t>(most(threads, 1), most<int64_t>(worth, 1)));
}

// Calls fn(from, to, threads) for all rows, `lanes` of them or a multiple at a time: a few long rows in one call, with
// threads to share each of them; else several parts side by side.
template <class Fn> void over_rows(int64_t rows, int64_t n, int wanted, int64_t lanes, const Fn& fn) {
  struct Context { const Fn* fn; int64_t rows, lanes, groups, chunks; };
  const int threads = team_for(wanted, rows, n);
  const int64_t groups = (rows + lanes - 1) / lanes;
  if (lanes == 1 && groups < threads) {
    fn(int64_t(0), rows, threads);
    return;
  }
  Context context{&fn, rows, lanes, groups, threads > 1 ? least<int64_t>(groups, 4 * threads) : 1};
  auto body = [](void* p, int64_t i) {
    const Context& c = *static_cast<const Context*>(p);
    (*c.fn)(c.groups * i / c.chunks * c.lanes, least(c.rows, c.groups * (i + 1) / c.chunks * c.lanes), 1);
  };
  if (threads > 1) khot_parallel(threads, context.chunks, body, &context);
  else body(&context, 0);
}

}  // namespace
