//! A token and its place in a text.

/// A token and the bytes `start .. end` of the text that it stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The token's id.
    pub id: u32,
    /// Offset of its first byte.
    pub start: usize,
    /// Offset after its last byte; the tokens of a character that was split share both offsets.
    pub end: usize,
}
