//! Stub, filled next: label selectors with the full grammar.

/// A label selector.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selector {
    text: String,
}

/// Why a selector cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SelectorError(pub String);

impl Selector {
    /// Reads `a=b,c!=d,e in (x,y),!f`; the empty text selects everything.
    ///
    /// # Errors
    /// Where the text does not follow the grammar.
    pub fn parse(text: &str) -> Result<Self, SelectorError> {
        Ok(Self {
            text: text.to_owned(),
        })
    }
}

impl std::fmt::Display for Selector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}
