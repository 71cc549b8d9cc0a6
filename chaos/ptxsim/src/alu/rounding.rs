//! Directions of rounding.

/// How a result that cannot be represented is rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// To nearest, ties to even.
    #[default]
    Nearest,
    /// To nearest, ties away from zero.
    NearestAway,
    Zero,
    Down,
    Up,
}

impl Rounding {
    /// The rounding of a modifier; the second value tells whether it rounds to an integer.
    pub(crate) fn parse(word: &str) -> Option<(Rounding, bool)> {
        Some(match word {
            "rn" => (Rounding::Nearest, false),
            "rna" => (Rounding::NearestAway, false),
            "rz" => (Rounding::Zero, false),
            "rm" => (Rounding::Down, false),
            "rp" => (Rounding::Up, false),
            "rni" => (Rounding::Nearest, true),
            "rzi" => (Rounding::Zero, true),
            "rmi" => (Rounding::Down, true),
            "rpi" => (Rounding::Up, true),
            _ => return None,
        })
    }

    pub(super) fn to_integer(self, x: f64) -> f64 {
        match self {
            Rounding::Nearest => x.round_ties_even(),
            Rounding::NearestAway => x.round(),
            Rounding::Zero => x.trunc(),
            Rounding::Down => x.floor(),
            Rounding::Up => x.ceil(),
        }
    }
}
