// What all attention kernels share: the tokens of a rank, their indexes within the row, and the tiles that see each other.
//
// A query sees the keys of its row whose index is between `from` and its own: from the start of its document, and inside the
// window. A context-parallel rank has two runs of each row, the runs `rank` and `2 n_ranks - 1 - rank` of `2 n_ranks`; without
// context parallelism there is one run, the whole row. A tile never spans two runs, so its indexes are consecutive.
struct Geometry {
    long long rows, seq_len; // rows of the batch, and tokens that one rank has of a row
    long long n_heads, n_kv_heads, window;
    long long n_ranks, q_rank, kv_rank, n_kv_ranks; // keys of the ranks from `kv_rank` on, one rank after the other
    long long q_stride, kv_stride; // elements between tokens
};

// Tokens that are neighbours in memory and have consecutive indexes.
struct Run {
    int first;       // index of its first token
    long long token; // number of its first token in memory
};
__device__ __forceinline__ int runs_of_rank(const Geometry& g) { return g.n_ranks == 1 ? 1 : 2; }
__device__ __forceinline__ int run_len(const Geometry& g) { return int(g.seq_len) / runs_of_rank(g); }
__device__ __forceinline__ int first_index(const Geometry& g, int rank, int run) {
    return (run ? 2 * int(g.n_ranks) - 1 - rank : rank) * run_len(g);
}
__device__ __forceinline__ Run query_run(const Geometry& g, int row, int run) {
    return {first_index(g, int(g.q_rank), run), row * g.seq_len + run * run_len(g)};
}
// `run` counts the runs of all ranks whose keys are operands.
__device__ __forceinline__ Run key_run(const Geometry& g, int row, int run) {
    const int rank = run / runs_of_rank(g), half = run % runs_of_rank(g);
    return {first_index(g, int(g.kv_rank) + rank, half), (rank * g.rows + row) * g.seq_len + half * run_len(g)};
}
__device__ __forceinline__ int n_key_runs(const Geometry& g) { return int(g.n_kv_ranks) * runs_of_rank(g); }

// Arrays that the adjoint prepares have an element for each query; runs are padded there, so that a tile's elements can be copied
// 16 bytes at a time.
__device__ __forceinline__ int padded_run(const Geometry& g) { return (run_len(g) + 3) / 4 * 4; }
__device__ __forceinline__ long long padded_queries(const Geometry& g) { return g.rows * runs_of_rank(g) * padded_run(g); }
__device__ __forceinline__ long long padded_place(const Geometry& g, int row, int run, int start) {
    return (long long)(row * runs_of_rank(g) + run) * padded_run(g) + start;
}

// The least index that a query sees.
__device__ __forceinline__ int first_visible(const Geometry& g, int index, int doc_start) {
    const long long of_window = index + 1 - g.window;
    return of_window > doc_start ? int(of_window) : doc_start;
}

// Up to `tile` tokens of a run.
struct Tile {
    int n;           // number of tokens
    int index;       // index of the first
    long long token; // number of the first in memory
};
__device__ __forceinline__ Tile tile_of(const Geometry& g, Run run, int start, int tile) {
    const int left = run_len(g) - start;
    return {left < tile ? left : tile, run.first + start, run.token + start};
}
// The tile of number `i` of a row's queries, and of its keys; `padded` is the place of the first query in prepared arrays.
__device__ __forceinline__ Tile query_tile(const Geometry& g, int row, int i, int tile, long long* padded = nullptr) {
    const int per_run = (run_len(g) + tile - 1) / tile, run = i / per_run;
    if (padded) *padded = padded_place(g, row, run, i % per_run * tile);
    return tile_of(g, query_run(g, row, run), i % per_run * tile, tile);
}
__device__ __forceinline__ Tile key_tile(const Geometry& g, int row, int i, int tile) {
    const int per_run = (run_len(g) + tile - 1) / tile, run = i / per_run;
    return tile_of(g, key_run(g, row, run), i % per_run * tile, tile);
}

// Visits the tiles of a row that have tokens with indexes in `low ..= high`, in a fixed order: `of(run)` gives the runs.
struct Tiles {
    int low, high; // visible indexes
    int run, start, end; // the current tile starts at `start`; no token of the run from `end` on is visible
    template <class Of> __device__ __forceinline__ bool next(const Geometry& g, int n_runs, int tile, Of of) {
        start += tile;
        while (start >= end) {
            if (++run >= n_runs) return false;
            const int first = of(run).first, from = low > first ? low - first : 0, n = run_len(g);
            end = high < first ? 0 : high - first < n ? high - first + 1 : n;
            start = from / tile * tile;
            if (from >= end) end = 0;
        }
        return true;
    }
};
__device__ __forceinline__ Tiles tiles_between(int low, int high) { return {low, high, -1, 0, 0}; }

// Least and greatest `from` of a tile's queries, at every thread; `from` in shared memory gets that of each query, and places
// beyond the tile's queries that of the last. For blocks of whole warps; ends with a barrier.
template <int SIZE> __device__ __forceinline__ void visible_indexes(const Geometry& g, const Tile& tile, const int* doc_start, int* from, int& low, int& high) {
    for (int i = threadIdx.x; i < SIZE; i += blockDim.x) {
        const int query = i < tile.n ? i : tile.n - 1;
        from[i] = first_visible(g, tile.index + query, doc_start[tile.token + query]);
    }
    __syncthreads();
    low = high = from[threadIdx.x % 32 % SIZE];
    for (int i = threadIdx.x % 32; i < SIZE; i += 32) {
        low = from[i] < low ? from[i] : low;
        high = from[i] > high ? from[i] : high;
    }
    for (int by = 16; by; by >>= 1) {
        const int l = __shfl_xor_sync(~0u, low, by), h = __shfl_xor_sync(~0u, high, by);
        low = l < low ? l : low;
        high = h > high ? h : high;
    }
}

// Eight or four neighbours from 16 bytes.
__device__ __forceinline__ void unpack_16(const float* from, float* to) {
    const float4 x = *(const float4*)from;
    to[0] = x.x; to[1] = x.y; to[2] = x.z; to[3] = x.w;
}
template <class T> __device__ __forceinline__ void unpack_16(const T* from, float* to) {
    const uint4 x = *(const uint4*)from;
    const unsigned words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to[2 * i] = to_float(T{(unsigned short)(words[i] & 0xffff)});
        to[2 * i + 1] = to_float(T{(unsigned short)(words[i] >> 16)});
    }
}

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
