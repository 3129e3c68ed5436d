//! Who asks.
//!
//! Purpose: the identity that authorisation is about.
//! Inputs: certificates, headers or a token, by way of `identity` and `review`.
//! Invariants: an authenticated user is in group `system:authenticated`.

use std::collections::BTreeMap;

/// Name of a caller that shows nothing.
pub(super) const ANONYMOUS: &str = "system:anonymous";
/// Group of callers that show nothing.
pub(super) const UNAUTHENTICATED: &str = "system:unauthenticated";
/// Group of all others.
pub(super) const AUTHENTICATED: &str = "system:authenticated";
/// Group that may do everything, as kube-apiserver's own availability checks do.
pub(super) const MASTERS: &str = "system:masters";

/// An identity.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct User {
    /// User name.
    pub name: String,
    /// Stable identifier, where the authenticator knows one.
    pub uid: Option<String>,
    /// Groups.
    pub groups: Vec<String>,
    /// Further facts by key.
    pub extra: BTreeMap<String, Vec<String>>,
}

impl User {
    /// The caller that shows nothing.
    #[must_use]
    pub fn anonymous() -> Self {
        Self {
            name: ANONYMOUS.to_owned(),
            groups: vec![UNAUTHENTICATED.to_owned()],
            ..Self::default()
        }
    }

    /// Adds the group of all authenticated users, unless the authenticator said otherwise.
    #[must_use]
    pub fn authenticated(mut self) -> Self {
        let settled = |group: &String| group == AUTHENTICATED || group == UNAUTHENTICATED;
        if self.name != ANONYMOUS && !self.groups.iter().any(settled) {
            self.groups.push(AUTHENTICATED.to_owned());
        }
        self
    }

    /// Whether access reviews are needless.
    #[must_use]
    pub fn is_master(&self) -> bool {
        self.groups.iter().any(|group| group == MASTERS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_but_anonymous_is_authenticated() {
        let alice = User {
            name: "alice".into(),
            ..User::default()
        };
        assert_eq!(alice.authenticated().groups, [AUTHENTICATED]);
        assert_eq!(User::anonymous().authenticated().groups, [UNAUTHENTICATED]);
    }
}
