//! Swizzles of shared memory: the chunks of 16 bytes within a row change places, row by row, so that a column of chunks lies in
//! different banks.

/// The width of a row whose chunks are permuted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Swizzle {
    /// No permutation.
    #[default]
    None,
    /// Rows of 32 bytes.
    Bytes32,
    /// Rows of 64 bytes.
    Bytes64,
    /// Rows of 128 bytes.
    Bytes128,
}

impl Swizzle {
    /// The swizzle of the two upper bits of a matrix descriptor.
    pub(super) fn of_descriptor(bits: u64) -> Swizzle {
        match bits >> 62 {
            1 => Swizzle::Bytes128,
            2 => Swizzle::Bytes64,
            3 => Swizzle::Bytes32,
            _ => Swizzle::None,
        }
    }

    fn bits(self) -> u32 {
        match self {
            Swizzle::None => 0,
            Swizzle::Bytes32 => 1,
            Swizzle::Bytes64 => 2,
            Swizzle::Bytes128 => 3,
        }
    }

    /// Bytes of a row; 16 without a swizzle.
    pub(super) fn row_bytes(self) -> u64 {
        16 << self.bits()
    }

    /// Where the byte at an address of the unpermuted layout lies.
    pub(super) fn apply(self, address: u64) -> u64 {
        let mask = (1u64 << self.bits()) - 1;
        address ^ (address >> 7 & mask) << 4
    }
}
