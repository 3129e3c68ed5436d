//! What to do about the certificate: a pure decision.
//!
//! Purpose: decides when to make a CA, when to make a serving certificate, and when to wait.
//! Inputs: what is held, whether every APIService of ours trusts all held CAs, the time.
//! Invariants: renewal begins after two thirds of a life; a certificate of a new CA waits until the CA is
//! trusted everywhere, unless the old certificate is useless anyway.

use std::time::Duration;

pub use super::material::{Held, HeldCert, Validity};

/// The next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// All is well.
    Keep,
    /// New CA and new certificate: there is nothing to build on.
    MakeAll,
    /// A new CA beside the old ones; the certificate stays.
    MakeCa,
    /// A new certificate by the signing CA.
    MakeCert,
}

/// Decides.
#[must_use]
pub fn plan(held: &Held, trusted_everywhere: bool, now: Duration) -> Step {
    let cert = held.cert.as_ref().filter(|cert| in_date(cert.validity, now));
    let Some(ca) = held.ca.filter(|ca| in_date(*ca, now)) else {
        // Whoever holds a usable certificate keeps serving it while the new CA spreads.
        return match cert {
            Some(cert) if cert.names_match => Step::MakeCa,
            _ => Step::MakeAll,
        };
    };
    let Some(cert) = cert.filter(|cert| cert.names_match) else {
        return Step::MakeCert;
    };
    if is_due(ca, now) && cert.by_signing_ca {
        return Step::MakeCa;
    }
    if !cert.by_signing_ca {
        return if trusted_everywhere {
            Step::MakeCert
        } else {
            Step::Keep
        };
    }
    if is_due(cert.validity, now) {
        return Step::MakeCert;
    }
    Step::Keep
}

fn in_date(validity: Validity, now: Duration) -> bool {
    validity.from <= now && now < validity.until
}

fn is_due(validity: Validity, now: Duration) -> bool {
    let life = validity.until.saturating_sub(validity.from);
    now >= validity.from + life * 2 / 3
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DAY: u64 = 24 * 3600;

    fn validity(from: u64, until: u64) -> Validity {
        Validity {
            from: Duration::from_secs(from * DAY),
            until: Duration::from_secs(until * DAY),
        }
    }

    fn held(ca: (u64, u64), cert: (u64, u64)) -> Held {
        Held {
            ca: Some(validity(ca.0, ca.1)),
            cert: Some(HeldCert {
                validity: validity(cert.0, cert.1),
                names_match: true,
                by_signing_ca: true,
            }),
        }
    }

    fn at(held: &Held, trusted: bool, day: u64) -> Step {
        plan(held, trusted, Duration::from_secs(day * DAY))
    }

    #[test]
    fn nothing_held_makes_all() {
        assert_eq!(at(&Held { ca: None, cert: None }, false, 5), Step::MakeAll);
    }

    #[test]
    fn a_certificate_is_renewed_after_two_thirds() {
        let held = held((0, 3650), (0, 90));
        assert_eq!(at(&held, true, 59), Step::Keep);
        assert_eq!(at(&held, true, 60), Step::MakeCert);
        assert_eq!(at(&held, false, 60), Step::MakeCert);
    }

    #[test]
    fn a_new_ca_is_trusted_before_it_is_used() {
        let mut held = held((0, 3650), (2400, 2490));
        assert_eq!(at(&held, true, 2434), Step::MakeCa);
        held.ca = Some(validity(2434, 6084));
        held.cert.as_mut().unwrap().by_signing_ca = false;
        assert_eq!(at(&held, false, 2435), Step::Keep);
        assert_eq!(at(&held, true, 2435), Step::MakeCert);
        assert_eq!(
            at(&held, false, 2491),
            Step::MakeCert,
            "the old one is of no use any more"
        );
    }

    #[test]
    fn other_names_need_another_certificate_at_once() {
        let mut held = held((0, 3650), (0, 90));
        held.cert.as_mut().unwrap().names_match = false;
        assert_eq!(at(&held, false, 1), Step::MakeCert);
    }

    proptest! {
        /// Whatever is held, following the plan ends in `Keep` within three steps.
        #[test]
        fn the_plan_comes_to_rest(
            ca in proptest::option::of((0_u64..4000, 1_u64..4000)),
            cert in proptest::option::of((0_u64..4000, 1_u64..200, any::<bool>(), any::<bool>())),
            day in 0_u64..4000,
        ) {
            let mut state = Held {
                ca: ca.map(|(from, life)| validity(from, from + life)),
                cert: cert.map(|(from, life, names_match, by_signing_ca)| HeldCert {
                    validity: validity(from, from + life),
                    names_match,
                    by_signing_ca,
                }),
            };
            let fresh = |life| Some(validity(day, day + life));
            let new_cert = || HeldCert { validity: validity(day, day + 90), names_match: true, by_signing_ca: true };
            let mut steps = 0;
            loop {
                match at(&state, true, day) {
                    Step::Keep => break,
                    Step::MakeAll => state = Held { ca: fresh(3650), cert: Some(new_cert()) },
                    Step::MakeCa => {
                        state.ca = fresh(3650);
                        state.cert.as_mut().unwrap().by_signing_ca = false;
                    }
                    Step::MakeCert => state.cert = Some(new_cert()),
                }
                steps += 1;
                prop_assert!(steps <= 3);
            }
            let cert = state.cert.unwrap();
            prop_assert!(cert.names_match && in_date(cert.validity, Duration::from_secs(day * DAY)));
        }
    }
}
