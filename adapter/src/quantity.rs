//! Stub, filled next: exact quantities in thousandths.

/// A quantity in thousandths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Quantity {
    millis: i64,
}

impl Quantity {
    /// From thousandths.
    #[must_use]
    pub const fn from_millis(millis: i64) -> Self {
        Self { millis }
    }
}

impl std::fmt::Display for Quantity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.millis % 1000 == 0 {
            write!(f, "{}", self.millis / 1000)
        } else {
            write!(f, "{}m", self.millis)
        }
    }
}
