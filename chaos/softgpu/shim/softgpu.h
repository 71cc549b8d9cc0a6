// What a CUDA kernel sees of the GPU, for the host compiler. Included in front of the preprocessed kernel source.
//
// A block runs on one OS thread. Each of its threads is a fiber that runs until it has to wait: at a barrier, in a warp
// operation, or in a spin. The order in which threads, warps and blocks run follows a seed, so a missing barrier shows as
// a result that depends on it. A wait that nobody can end is an error, not a hang.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <sys/mman.h>
#include <utility>

#define __global__ static
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__

#include "types.h"
#include "block.h"
#include "warp.h"
#include "launch.h"
#include "atomics.h"
#include "arithmetic.h"
#include "prelude.h"
