//! Whether a licence expression is satisfied by the licences we accept.
//!
//! Inputs: an SPDX expression as in a manifest (`MIT OR Apache-2.0`, also the old `MIT/Apache-2.0`) and the
//! accepted ids. Invariants: `OR` needs one side, `AND` both; an id `WITH` an exception must be accepted in
//! that very form; what cannot be parsed is refused.

/// Whether the expression can be met with accepted licences only.
pub(crate) fn is_accepted(expression: &str, accepted: &[String]) -> bool {
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut parser = Parser {
        words: &words,
        accepted,
    };
    parser.any() == Some(true) && parser.words.is_empty()
}

struct Parser<'a> {
    words: &'a [&'a str],
    accepted: &'a [String],
}

impl<'a> Parser<'a> {
    fn take(&mut self, wanted: &str) -> bool {
        match self.words.split_first() {
            Some((word, rest)) if *word == wanted => {
                self.words = rest;
                true
            }
            _ => false,
        }
    }

    fn next(&mut self) -> Option<&'a str> {
        let (word, rest) = self.words.split_first()?;
        self.words = rest;
        Some(word)
    }

    fn any(&mut self) -> Option<bool> {
        let mut met = self.all()?;
        while self.take("OR") {
            met |= self.all()?;
        }
        Some(met)
    }

    fn all(&mut self) -> Option<bool> {
        let mut met = self.one()?;
        while self.take("AND") {
            met &= self.one()?;
        }
        Some(met)
    }

    fn one(&mut self) -> Option<bool> {
        if self.take("(") {
            let met = self.any()?;
            return self.take(")").then_some(met);
        }
        let id = self.next()?;
        let id = if self.take("WITH") {
            format!("{id} WITH {}", self.next()?)
        } else {
            id.to_owned()
        };
        Some(self.accepted.contains(&id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ok(expression: &str) -> bool {
        let accepted = [
            "MIT",
            "Apache-2.0",
            "Apache-2.0 WITH LLVM-exception",
            "Unicode-3.0",
        ]
        .map(str::to_owned);
        is_accepted(expression, &accepted)
    }

    #[test]
    fn or_needs_one_side_and_and_needs_both() {
        assert!(ok("MIT"));
        assert!(ok("MIT OR GPL-3.0"));
        assert!(ok("GPL-3.0/MIT"));
        assert!(ok("(MIT OR Apache-2.0) AND Unicode-3.0"));
        assert!(!ok("MIT AND GPL-3.0"));
        assert!(!ok("GPL-3.0"));
        assert!(ok("GPL-3.0 AND ISC OR MIT"));
    }

    #[test]
    fn an_exception_must_be_accepted_itself() {
        assert!(ok("Apache-2.0 WITH LLVM-exception OR GPL-3.0"));
        assert!(!ok("MIT WITH Odd-exception"));
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(!ok(""));
        assert!(!ok("MIT OR"));
        assert!(!ok("(MIT"));
        assert!(!ok("MIT MIT"));
    }
}
