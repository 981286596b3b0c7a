// What the entry points for sorting, ranks, tournaments and weighted sums share: rows among threads, types, return codes.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>

#define KHOT_API extern "C" __attribute__((visibility("default")))

extern "C" __attribute__((visibility("hidden"))) void khot_parallel(int threads, int64_t count, void (*body)(void*, int64_t), void* context);

// What an entry point returns.
enum KhotCode { kDone = 0, kBadShape = 1, kBadType = 2, kNoMemory = 3 };

namespace {

constexpr int64_t kWorthThreads = 1 << 13;  // items below which one thread is done before a second has woken up
constexpr int64_t kMostItems = 1 << 30;     // in a row: they are counted in 32 bits

// fn(begin, end) over pieces of [0, count), where each piece may throw for want of memory; whether all went well.
template <class Fn> bool share_work(int threads, int64_t count, int64_t items_each, const Fn& fn) {
  if (count * items_each < kWorthThreads) threads = 1;
  struct Context { const Fn* fn; int64_t count, pieces; std::atomic<bool> failed; };
  Context context{&fn, count, threads > 1 ? std::min<int64_t>(count, int64_t(threads) * 4) : 1, {false}};
  auto body = [](void* p, int64_t i) {
    Context& c = *static_cast<Context*>(p);
    try {
      (*c.fn)(c.count * i / c.pieces, c.count * (i + 1) / c.pieces);
    } catch (const std::bad_alloc&) {
      c.failed = true;
    }
  };
  khot_parallel(threads, context.pieces, body, &context);
  return !context.failed;
}

// Memory may run out outside the threads too.
template <class Fn> int code_of(const Fn& fn) {
  try {
    return fn() ? kDone : kNoMemory;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

// fn(T()) for the type with this number: 0 float32, 1 float64.
template <class Fn> int by_type(int dtype, const Fn& fn) {
  if (dtype == 0) return code_of([&] { return fn(float()); });
  if (dtype == 1) return code_of([&] { return fn(double()); });
  return kBadType;
}

inline bool fits(int64_t rows, int64_t n) { return rows >= 0 && n >= 0 && n <= kMostItems; }

}  // namespace
