// Pool adjacent violators: the blocks of equal values of an isotonic regression, found in one walk along the row.
//
// A law says what is known of a block, when two neighbours must become one, and what is known of their union:
//   Block one(first), bool pools(a, b), void take(a, b) just after pools(a, b).
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

// The last block is kept out of the stack: it is the one that grows.
template <class Law> void pool(const Law& law, int64_t n, std::vector<Block>& blocks) {
  blocks.clear();
  Block top = law.one(0);
  for (int64_t i = 1; i < n; i++) {
    Block next = law.one(i);
    if (!law.pools(top, next)) {
      blocks.push_back(top);
      top = next;
      continue;
    }
    law.take(top, next), top.count++;
    while (!blocks.empty() && law.pools(blocks.back(), top)) {
      Block before = blocks.back();
      law.take(before, top), before.count += top.count;
      top = before;
      blocks.pop_back();
    }
  }
  blocks.push_back(top);
}

}  // namespace
