//! How the rows of a batch are divided into documents.
//!
//! A plan is made for a number of documents and for the length of the longest. Both are rounded up to few values, so that a
//! job soon has all plans that its batches need.

/// See the [module](self). Documents of one token do not count: they need no plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packing {
    /// Every row is one document.
    Whole { rows: usize, seq_len: usize },
    /// The most documents of a batch, and the tokens of the longest, both rounded up.
    Documents { n: usize, longest: usize },
    /// Nobody knows.
    Unknown,
}

impl Packing {
    /// Of rows of `seq_len` tokens: the index in its row at which the document of each token begins.
    pub(crate) fn of(doc_start: &[i32], seq_len: usize) -> Packing {
        if doc_start.iter().all(|start| *start == 0) {
            return Packing::Whole { rows: doc_start.len() / seq_len, seq_len };
        }
        let (mut n, mut longest) = (0, 0);
        for row in doc_start.chunks(seq_len) {
            for (index, start) in row.iter().enumerate() {
                let is_last = row.get(index + 1).is_none_or(|next| next != start);
                let length = (index + 1).saturating_sub(*start as usize);
                if is_last && length > 1 {
                    (n, longest) = (n + 1, longest.max(length));
                }
            }
        }
        Packing::Documents { n: rounded(n.max(1)), longest: rounded(longest.max(2)).min(seq_len) }
    }

    /// A packing whose plans serve batches of both.
    pub(crate) fn or(self, other: Packing) -> Packing {
        if self == other {
            return self;
        }
        match (self.documents(), other.documents()) {
            (Some((n, longest)), Some((m, length))) => Packing::Documents { n: n.max(m), longest: longest.max(length) },
            _ => Packing::Unknown,
        }
    }

    /// Documents, and tokens of the longest.
    fn documents(self) -> Option<(usize, usize)> {
        match self {
            Packing::Whole { rows, seq_len } => Some((rounded(rows), seq_len)),
            Packing::Documents { n, longest } => Some((n, longest)),
            Packing::Unknown => None,
        }
    }
}

/// The next larger number of at most two significant bits: 1, 2, 3, 4, 6, 8, 12, …
fn rounded(n: usize) -> usize {
    let power = n.next_power_of_two();
    let less = power / 4 * 3;
    if n <= less { less } else { power }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_rows_have_no_documents() {
        assert_eq!(Packing::of(&[0; 12], 4), Packing::Whole { rows: 3, seq_len: 4 });
    }

    #[test]
    fn documents_of_two_tokens_and_more_are_counted() {
        // Two, one, five tokens; eight; seven, one.
        let starts = [0, 0, 2, 3, 3, 3, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7];

        assert_eq!(Packing::of(&starts, 8), Packing::Documents { n: 4, longest: 8 });
    }

    #[test]
    fn sizes_are_rounded_up_to_two_significant_bits() {
        let rounded_up = [1, 2, 3, 4, 5, 6, 7, 9, 13, 100].map(rounded);

        assert_eq!(rounded_up, [1, 2, 3, 4, 6, 6, 8, 12, 16, 128]);
    }

    #[test]
    fn plans_for_two_batches_serve_the_larger_numbers() {
        let (a, b) = (Packing::Documents { n: 4, longest: 64 }, Packing::Documents { n: 8, longest: 32 });
        let whole = Packing::Whole { rows: 5, seq_len: 128 };

        assert_eq!(a.or(b), Packing::Documents { n: 8, longest: 64 });
        assert_eq!(whole.or(a), Packing::Documents { n: 6, longest: 128 });
        assert_eq!(whole.or(whole), whole);
        assert_eq!(a.or(Packing::Unknown), Packing::Unknown);
    }
}
