//! Stub, filled next.
