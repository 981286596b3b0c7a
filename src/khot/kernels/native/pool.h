// Pool adjacent violators: the blocks of equal values of an isotonic regression, found in one walk along the row.
//
// A law says what is known of a block, when two neighbours must become one, and what is known of their union:
//   Block one(first), bool pools(a, b), void take(a, b).
// Blocks hold their statistics about their own first value. So nothing cancels, however far apart the blocks are.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

struct Block {
  int64_t first, count;
  double stat, other;  // what the law keeps
};

template <class Law> void pool(const Law& law, int64_t n, std::vector<Block>& blocks) {
  blocks.clear();
  for (int64_t i = 0; i < n; i++) {
    Block last = law.one(i);
    while (!blocks.empty() && law.pools(blocks.back(), last)) {
      Block whole = blocks.back();
      law.take(whole, last);
      last = whole, last.count = i + 1 - last.first;
      blocks.pop_back();
    }
    blocks.push_back(last);
  }
}

}  // namespace
