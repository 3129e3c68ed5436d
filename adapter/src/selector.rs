//! Label selectors with the grammar of Kubernetes.
//!
//! Purpose: `labelSelector` over pod labels and `metricLabelSelector` over series labels.
//! Inputs: the text of one query parameter.
//! Invariants: accepts what `labels.Parse` of apimachinery accepts, minus `>` and `<`, which no metrics API
//! serves and which are refused by name; a missing label satisfies `!=` and `notin`, as there; an error names
//! the position (in bytes, from 1) and what was expected.

use std::fmt;

/// A label selector: all requirements must hold. The default selects everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Selector {
    requirements: Vec<Requirement>,
}

/// One condition on one label.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Requirement {
    /// Label key.
    pub key: String,
    /// What is asked of it.
    pub operator: Operator,
    /// Values compared with, sorted and distinct; empty for the two presence operators.
    pub values: Vec<String>,
}

/// What a requirement asks of a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operator {
    /// `=`, `==` or `in`: present with one of the values.
    In,
    /// `!=` or `notin`: absent, or present with another value.
    NotIn,
    /// The key alone: present.
    Exists,
    /// `!key`: absent.
    DoesNotExist,
}

/// Why a selector cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SelectorError(pub String);

/// Longest label value and longest name part of a key, in bytes (Kubernetes' own limit).
const MAX_NAME: usize = 63;
/// Longest prefix of a key, in bytes (a DNS subdomain).
const MAX_PREFIX: usize = 253;

impl Selector {
    /// Reads `a=b,c!=d,e in (x,y),!f`; the empty text selects everything.
    ///
    /// # Errors
    /// Where the text does not follow the grammar, with the position.
    pub fn parse(text: &str) -> Result<Self, SelectorError> {
        Parser { text, at: 0 }.selector()
    }

    /// Whether every object is selected.
    #[must_use]
    pub fn is_everything(&self) -> bool {
        self.requirements.is_empty()
    }

    /// The conditions, in the order they were written.
    #[must_use]
    pub fn requirements(&self) -> &[Requirement] {
        &self.requirements
    }

    /// Whether an object is selected; `label` looks a label up by key.
    pub fn matches<'a>(&self, label: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.requirements.iter().all(|requirement| {
            let value = label(&requirement.key);
            let listed = value.is_some_and(|value| {
                requirement
                    .values
                    .binary_search_by(|candidate| candidate.as_str().cmp(value))
                    .is_ok()
            });
            match requirement.operator {
                Operator::In => listed,
                Operator::NotIn => !listed,
                Operator::Exists => value.is_some(),
                Operator::DoesNotExist => value.is_none(),
            }
        })
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, requirement) in self.requirements.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            let Requirement {
                key,
                operator,
                values,
            } = requirement;
            match (operator, values.as_slice()) {
                (Operator::Exists, _) => f.write_str(key)?,
                (Operator::DoesNotExist, _) => write!(f, "!{key}")?,
                (Operator::In, [one]) => write!(f, "{key}={one}")?,
                (Operator::NotIn, [one]) => write!(f, "{key}!={one}")?,
                (Operator::In, several) => write!(f, "{key} in ({})", several.join(","))?,
                (Operator::NotIn, several) => write!(f, "{key} notin ({})", several.join(","))?,
            }
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token<'a> {
    Word(&'a str),
    Equals,
    NotEquals,
    Bang,
    Comma,
    Open,
    Close,
    Greater,
    Less,
    End,
}

impl fmt::Display for Token<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Word(word) => word,
            Self::Equals => "=",
            Self::NotEquals => "!=",
            Self::Bang => "!",
            Self::Comma => ",",
            Self::Open => "(",
            Self::Close => ")",
            Self::Greater => ">",
            Self::Less => "<",
            Self::End => "end of text",
        })
    }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Parser<'a> {
    /// The next token, where it starts, and where the one after it may start.
    fn peek(&self) -> (Token<'a>, usize, usize) {
        let bytes = self.text.as_bytes();
        let mut start = self.at;
        while bytes.get(start).is_some_and(u8::is_ascii_whitespace) {
            start += 1;
        }
        let second = bytes.get(start + 1);
        let (token, length) = match bytes.get(start) {
            None => (Token::End, 0),
            Some(b'=') => (Token::Equals, if second == Some(&b'=') { 2 } else { 1 }),
            Some(b'!') if second == Some(&b'=') => (Token::NotEquals, 2),
            Some(b'!') => (Token::Bang, 1),
            Some(b',') => (Token::Comma, 1),
            Some(b'(') => (Token::Open, 1),
            Some(b')') => (Token::Close, 1),
            Some(b'>') => (Token::Greater, 1),
            Some(b'<') => (Token::Less, 1),
            Some(_) => {
                let rest = &self.text[start..];
                let length = rest
                    .find(|c: char| c.is_ascii_whitespace() || "=!,()><".contains(c))
                    .unwrap_or(rest.len());
                (Token::Word(&rest[..length]), length)
            }
        };
        (token, start, start + length)
    }

    fn next(&mut self) -> (Token<'a>, usize) {
        let (token, start, end) = self.peek();
        self.at = end;
        (token, start)
    }

    fn error<T>(&self, at: usize, found: Token<'_>, expected: &str) -> Result<T, SelectorError> {
        Err(SelectorError(format!(
            "unable to parse selector \"{}\": at position {} found '{found}', expected {expected}",
            self.text,
            at + 1
        )))
    }

    fn invalid<T>(&self, at: usize, cause: &str) -> Result<T, SelectorError> {
        Err(SelectorError(format!(
            "unable to parse selector \"{}\": at position {} {cause}",
            self.text,
            at + 1
        )))
    }

    fn selector(mut self) -> Result<Selector, SelectorError> {
        let mut requirements = Vec::new();
        if self.peek().0 == Token::End {
            return Ok(Selector { requirements });
        }
        loop {
            requirements.push(self.requirement()?);
            match self.next() {
                (Token::End, _) => return Ok(Selector { requirements }),
                (Token::Comma, _) => {}
                (token, at) => return self.error(at, token, "',' or the end of the text"),
            }
        }
    }

    fn requirement(&mut self) -> Result<Requirement, SelectorError> {
        let absent = self.peek().0 == Token::Bang;
        if absent {
            self.next();
        }
        let (token, at) = self.next();
        let Token::Word(key) = token else {
            return self.error(
                at,
                token,
                if absent {
                    "a label key"
                } else {
                    "a label key or '!'"
                },
            );
        };
        if let Err(cause) = check_key(key) {
            return self.invalid(at, &format!("label key '{key}' {cause}"));
        }
        let (operator, mut values) = if absent {
            (Operator::DoesNotExist, Vec::new())
        } else {
            self.restriction()?
        };
        values.sort_unstable();
        values.dedup();
        Ok(Requirement {
            key: key.to_owned(),
            operator,
            values,
        })
    }

    fn restriction(&mut self) -> Result<(Operator, Vec<String>), SelectorError> {
        let (token, at, end) = self.peek();
        match token {
            Token::End | Token::Comma => return Ok((Operator::Exists, Vec::new())),
            _ => self.at = end,
        }
        match token {
            Token::Equals => Ok((Operator::In, vec![self.value()?])),
            Token::NotEquals => Ok((Operator::NotIn, vec![self.value()?])),
            Token::Word("in") => Ok((Operator::In, self.values("in")?)),
            Token::Word("notin") => Ok((Operator::NotIn, self.values("notin")?)),
            Token::Greater | Token::Less => self.invalid(
                at,
                &format!(
                    "operator '{token}' is not supported: use =, ==, !=, in, notin, a key alone, or !key"
                ),
            ),
            _ => self.error(at, token, "=, ==, !=, in, notin, ',' or the end of the text"),
        }
    }

    fn value(&mut self) -> Result<String, SelectorError> {
        match self.peek() {
            (Token::End | Token::Comma, ..) => Ok(String::new()),
            (Token::Word(word), at, end) => {
                self.at = end;
                self.checked(word, at)
            }
            (token, at, _) => self.error(at, token, "a label value"),
        }
    }

    fn values(&mut self, operator: &str) -> Result<Vec<String>, SelectorError> {
        let (token, at) = self.next();
        if token != Token::Open {
            return self.error(at, token, &format!("'(' after '{operator}'"));
        }
        if let (Token::Close, at, _) = self.peek() {
            return self.invalid(at, &format!("the values of '{operator}' are empty"));
        }
        let mut values = Vec::new();
        loop {
            match self.peek() {
                (Token::Word(word), at, end) => {
                    self.at = end;
                    values.push(self.checked(word, at)?);
                }
                (Token::Comma | Token::Close, ..) => values.push(String::new()),
                (token, at, _) => return self.error(at, token, "a label value, ',' or ')'"),
            }
            match self.next() {
                (Token::Comma, _) => {}
                (Token::Close, _) => return Ok(values),
                (token, at) => return self.error(at, token, "',' or ')'"),
            }
        }
    }

    fn checked(&self, value: &str, at: usize) -> Result<String, SelectorError> {
        match check_name(value) {
            Ok(()) => Ok(value.to_owned()),
            Err(cause) => self.invalid(at, &format!("label value '{value}' {cause}")),
        }
    }
}

/// `[prefix/]name`, as Kubernetes' qualified names.
fn check_key(key: &str) -> Result<(), &'static str> {
    let name = match key.split_once('/') {
        None => key,
        Some((prefix, name)) => {
            let part = |part: &str| {
                let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
                !part.is_empty() && part.bytes().all(inner) && !part.starts_with('-') && !part.ends_with('-')
            };
            if prefix.len() > MAX_PREFIX || !prefix.split('.').all(part) {
                return Err("has a prefix that is not a DNS subdomain");
            }
            name
        }
    };
    if name.is_empty() {
        return Err("has an empty name");
    }
    check_name(name)
}

/// At most 63 bytes of letters, digits, `-`, `_` and `.`, with a letter or digit at both ends.
fn check_name(name: &str) -> Result<(), &'static str> {
    if name.len() > MAX_NAME {
        return Err("is longer than 63 characters");
    }
    let ends = |b: Option<u8>| b.is_none_or(|b| b.is_ascii_alphanumeric());
    let inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    if ends(name.bytes().next()) && ends(name.bytes().last()) && name.bytes().all(inner) {
        Ok(())
    } else {
        Err("must consist of letters, digits, '-', '_' or '.', with a letter or digit at both ends")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn selects(selector: &str, labels: &[(&str, &str)]) -> bool {
        let labels: BTreeMap<_, _> = labels.iter().copied().collect();
        Selector::parse(selector)
            .unwrap()
            .matches(|key| labels.get(key).copied())
    }

    #[test]
    fn each_operator_selects_what_kubectl_selects() {
        let labels = [("app", "llm"), ("tier", "gold"), ("empty", "")];
        for (selector, expected) in [
            ("", true),
            ("   ", true),
            ("app=llm", true),
            ("app == llm", true),
            ("app=other", false),
            ("app!=other", true),
            ("missing!=x", true),
            ("app in (a, llm)", true),
            ("app in (a,b)", false),
            ("app notin (a,b)", true),
            ("missing notin (a)", true),
            ("missing in (a)", false),
            ("app", true),
            ("missing", false),
            ("!missing", true),
            ("! app", false),
            ("empty=", true),
            ("empty in (,x)", true),
            ("app=,tier=gold", false),
            ("app=llm,tier in (gold,silver),!missing", true),
            ("app=llm,tier=silver", false),
            ("in in (in)", false),
            ("app.kubernetes.io/name=x", false),
        ] {
            assert_eq!(selects(selector, &labels), expected, "{selector}");
        }
    }

    #[test]
    fn bad_grammar_names_the_position() {
        for (selector, position, fragment) in [
            ("a=b,", 5, "expected a label key"),
            (",a", 1, "found ','"),
            ("a=b c", 5, "found 'c'"),
            ("a in x", 6, "expected '('"),
            ("a in ()", 7, "empty"),
            ("a in (x", 8, "expected ',' or ')'"),
            ("a=(", 3, "expected a label value"),
            ("!a=b", 3, "expected ','"),
            ("a > 1", 3, "operator '>' is not supported"),
            ("a<1", 2, "operator '<' is not supported"),
            ("-a=b", 1, "label key '-a'"),
            ("UPPER.x/a=b", 1, "prefix"),
            ("a/=b", 1, "empty name"),
            ("a=b$", 3, "label value 'b$'"),
            ("a=é", 3, "label value"),
        ] {
            let error = Selector::parse(selector).unwrap_err().to_string();
            assert!(
                error.contains(&format!("position {position} ")),
                "{selector}: {error}"
            );
            assert!(error.contains(fragment), "{selector}: {error}");
        }
        assert!(Selector::parse(&format!("a={}", "x".repeat(64))).is_err());
        assert!(Selector::parse(&format!("a={}", "x".repeat(63))).is_ok());
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,40}") {
            let _ = Selector::parse(&text);
        }

        #[test]
        fn grammar_soup_never_panics_and_reads_back(text in "[ab=!,() inot><]{0,24}") {
            if let Ok(selector) = Selector::parse(&text) {
                let shown = selector.to_string();
                prop_assert_eq!(Selector::parse(&shown).unwrap(), selector, "{}", shown);
            }
        }

        #[test]
        fn negation_is_the_opposite(key in "[a-c]", value in "[x-z]", labels in proptest::collection::btree_map("[a-c]", "[x-z]", 0..3)) {
            let get = |k: &str| labels.get(k).map(String::as_str);
            for (yes, no) in [
                (format!("{key}={value}"), format!("{key}!={value}")),
                (format!("{key} in ({value},w)"), format!("{key} notin ({value},w)")),
                (key.clone(), format!("!{key}")),
            ] {
                prop_assert_ne!(Selector::parse(&yes).unwrap().matches(get), Selector::parse(&no).unwrap().matches(get));
            }
        }
    }
}
