// Weights as updates and embeddings access them. WIDTH: elements of a thread at a time.

// An f32 weight.
struct Whole {
    static constexpr int WIDTH = 4;
    float* p;
    __device__ __forceinline__ unsigned long long starts() const { return (unsigned long long)p; }
    template <int N> __device__ __forceinline__ void load(float (&to)[N], long long i) const { load_vector(to, p + i); }
    template <int N> __device__ __forceinline__ void store(long long i, const float (&from)[N]) const { store_vector(p + i, from); }
};
// An f32 weight in two parts: its upper halves, plus one where the rest is at least 0x8000, and its lower halves.
struct Split {
    static constexpr int WIDTH = 8;
    unsigned short *first, *rest;
    __device__ __forceinline__ unsigned long long starts() const { return (unsigned long long)first | (unsigned long long)rest; }
    template <int N> __device__ __forceinline__ void load(float (&to)[N], long long i) const {
        Vector<unsigned short, N> high = *(const Vector<unsigned short, N>*)(first + i), low = *(const Vector<unsigned short, N>*)(rest + i);
        for (int j = 0; j < N; j++) to[j] = __uint_as_float((unsigned(high.at[j]) << 16) + low.at[j] - (unsigned(low.at[j] & 0x8000) << 1));
    }
    template <int N> __device__ __forceinline__ void store(long long i, const float (&from)[N]) const {
        Vector<unsigned short, N> high, low;
        for (int j = 0; j < N; j++) {
            // What is no number would become one if it were rounded.
            unsigned bits = from[j] == from[j] ? __float_as_uint(from[j]) : 0x7fc00000u;
            high.at[j] = (unsigned short)((bits + 0x8000u) >> 16);
            low.at[j] = (unsigned short)bits;
        }
        *(Vector<unsigned short, N>*)(first + i) = high;
        *(Vector<unsigned short, N>*)(rest + i) = low;
    }
};
