//! How counters misbehave, as the control file tells it.

use serde::{Deserialize, Serialize};

/// Counters of one GPU: energy, NVLink, PCIe, throttle time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CounterControl {
    /// Each time that this number changes, all counters and error totals begin at 0 anew, as after a GPU reset.
    pub resets: u64,
    /// Width of the traffic and energy counters, bits: they wrap. Default: 64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bits: Option<u32>,
    /// Added to the traffic and energy counters, to bring a wrap near.
    pub start: u64,
}

impl CounterControl {
    /// What a client reads for a count of `value`.
    pub(crate) fn shown(&self, value: u64) -> u64 {
        let value = value.wrapping_add(self.start);
        match self.bits {
            Some(bits @ 1..64) => value & ((1 << bits) - 1),
            _ => value,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_wrap_at_their_width() {
        let control = CounterControl {
            bits: Some(32),
            start: u64::from(u32::MAX),
            ..CounterControl::default()
        };
        assert_eq!(
            [control.shown(0), control.shown(1), control.shown(5)],
            [4_294_967_295, 0, 4]
        );
        assert_eq!(CounterControl::default().shown(7), 7);
    }
}
