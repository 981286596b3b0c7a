// Where kernel.cpp finds the entmax families of its instruction set: a file of their own halves the longest compilation.
#pragma once
#include "drive.h"

#define KHOT_ENTMAX_FORWARD KHOT_JOIN(khot_entmax_forward_, KHOT_ISA)
#define KHOT_ENTMAX_BACKWARD KHOT_JOIN(khot_entmax_backward_, KHOT_ISA)

extern "C" __attribute__((visibility("hidden"))) int KHOT_ENTMAX_FORWARD(int family, int dtype, const KhotForward& a);
extern "C" __attribute__((visibility("hidden"))) int KHOT_ENTMAX_BACKWARD(int family, int dtype, const KhotBackward& a);
