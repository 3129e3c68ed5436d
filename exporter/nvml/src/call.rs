//! Every NVML call by name, how long it took, and which one runs right now.
//!
//! Invariants: counting takes no lock, so a call that hangs cannot hold up another thread's count.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::reading::{Code, Gap};

macro_rules! calls {
    ($( $name:ident = $symbol:literal; )*) => {
        /// An NVML call, named by the symbol it goes to.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Call { $(
            #[doc = $symbol]
            $name,
        )* }

        impl Call {
            /// Every call.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The symbol.
            #[must_use]
            pub const fn symbol(self) -> &'static str {
                match self { $(Self::$name => $symbol),* }
            }
        }
    };
}

calls! {
    Init = "nvmlInit_v2";
    DriverVersion = "nvmlSystemGetDriverVersion";
    Count = "nvmlDeviceGetCount_v2";
    HandleByIndex = "nvmlDeviceGetHandleByIndex_v2";
    Name = "nvmlDeviceGetName";
    Uuid = "nvmlDeviceGetUUID";
    Serial = "nvmlDeviceGetSerial";
    MinorNumber = "nvmlDeviceGetMinorNumber";
    PciInfo = "nvmlDeviceGetPciInfo_v3";
    Architecture = "nvmlDeviceGetArchitecture";
    ComputeCapability = "nvmlDeviceGetCudaComputeCapability";
    UtilizationRates = "nvmlDeviceGetUtilizationRates";
    MemoryInfo = "nvmlDeviceGetMemoryInfo_v2";
    FieldValues = "nvmlDeviceGetFieldValues";
    PowerUsage = "nvmlDeviceGetPowerUsage";
    Temperature = "nvmlDeviceGetTemperature";
    TemperatureV = "nvmlDeviceGetTemperatureV";
    ClockInfo = "nvmlDeviceGetClockInfo";
    ClocksEventReasons = "nvmlDeviceGetCurrentClocksEventReasons";
    ClocksThrottleReasons = "nvmlDeviceGetCurrentClocksThrottleReasons";
    RemappedRows = "nvmlDeviceGetRemappedRows";
    FabricInfoV = "nvmlDeviceGetGpuFabricInfoV";
    FabricInfo = "nvmlDeviceGetGpuFabricInfo";
    NvLinkState = "nvmlDeviceGetNvLinkState";
    GpmSupport = "nvmlGpmQueryDeviceSupport";
    GpmSampleAlloc = "nvmlGpmSampleAlloc";
    GpmSampleGet = "nvmlGpmSampleGet";
    GpmMetricsGet = "nvmlGpmMetricsGet";
    EventSetCreate = "nvmlEventSetCreate";
    RegisterEvents = "nvmlDeviceRegisterEvents";
    EventSetWait = "nvmlEventSetWait_v2";
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.symbol())
    }
}

/// Upper bounds of the latency buckets, in seconds: a ring read, a getter, a slow getter, a stall.
pub const BUCKETS: [f64; 6] = [0.000_1, 0.001, 0.01, 0.1, 1.0, 10.0];

#[derive(Debug, Default)]
struct Tally {
    buckets: [AtomicU64; BUCKETS.len()],
    count: AtomicU64,
    nanoseconds: AtomicU64,
}

/// How often and how long one call ran.
#[derive(Debug, Clone, PartialEq)]
pub struct CallFigures {
    /// Which call.
    pub call: Call,
    /// Calls that returned.
    pub count: u64,
    /// Seconds spent in them.
    pub seconds: f64,
    /// Calls per latency bucket, cumulative, in the order of [`BUCKETS`].
    pub cumulative: [u64; BUCKETS.len()],
}

/// Counts of all calls of a process, kept across re-opening of the library.
#[derive(Debug)]
pub struct CallLog {
    tallies: Vec<Tally>,
    /// Few pairs, written on failure only; unsupported answers are not failures.
    failures: Mutex<BTreeMap<(Call, Code), u64>>,
}

impl Default for CallLog {
    fn default() -> Self {
        Self {
            tallies: Call::ALL.iter().map(|_| Tally::default()).collect(),
            failures: Mutex::new(BTreeMap::new()),
        }
    }
}

impl CallLog {
    pub(crate) fn returned(&self, call: Call, took: Duration) {
        let Some(tally) = self.tallies.get(call as usize) else {
            return;
        };
        let seconds = took.as_secs_f64();
        if let Some(bucket) = BUCKETS
            .iter()
            .position(|bound| seconds <= *bound)
            .and_then(|at| tally.buckets.get(at))
        {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        tally.count.fetch_add(1, Ordering::Relaxed);
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        tally.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// Counts a failed call or a failed entry of a batch.
    pub fn failed(&self, call: Call, code: Code) {
        let mut failures = self
            .failures
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        *failures.entry((call, code)).or_insert(0) += 1;
    }

    /// Failures by call and code.
    #[must_use]
    pub fn failures(&self) -> Vec<(Call, Code, u64)> {
        let failures = self
            .failures
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        failures
            .iter()
            .map(|((call, code), count)| (*call, *code, *count))
            .collect()
    }

    /// Figures of every call that was made at least once.
    #[must_use]
    pub fn figures(&self) -> Vec<CallFigures> {
        Call::ALL
            .iter()
            .zip(&self.tallies)
            .filter_map(|(call, tally)| {
                let count = tally.count.load(Ordering::Relaxed);
                if count == 0 {
                    return None;
                }
                let mut cumulative = [0; BUCKETS.len()];
                let mut sum = 0;
                for (slot, bucket) in cumulative.iter_mut().zip(&tally.buckets) {
                    sum += bucket.load(Ordering::Relaxed);
                    *slot = sum;
                }
                let nanoseconds = tally.nanoseconds.load(Ordering::Relaxed);
                Some(CallFigures {
                    call: *call,
                    count,
                    seconds: Duration::from_nanos(nanoseconds).as_secs_f64(),
                    cumulative,
                })
            })
            .collect()
    }
}

/// The call that one thread is in, readable from other threads.
#[derive(Debug)]
pub struct InFlight {
    epoch: Instant,
    /// 0: none; else `(milliseconds since epoch << 8 | call) + 1`, so call and start are read as one.
    state: AtomicU64,
}

impl Default for InFlight {
    fn default() -> Self {
        Self {
            epoch: Instant::now(),
            state: AtomicU64::new(0),
        }
    }
}

impl InFlight {
    fn begin(&self, call: Call, now: Instant) {
        let since =
            u64::try_from(now.saturating_duration_since(self.epoch).as_millis()).unwrap_or(u64::MAX >> 9);
        self.state
            .store((since << 8 | call as u64) + 1, Ordering::Release);
    }

    fn end(&self) {
        self.state.store(0, Ordering::Release);
    }

    /// The call that runs, and for how long.
    #[must_use]
    pub fn current(&self, now: Instant) -> Option<(Call, Duration)> {
        let packed = self.state.load(Ordering::Acquire).checked_sub(1)?;
        let call = usize::try_from(packed & 0xff)
            .ok()
            .and_then(|at| Call::ALL.get(at))?;
        let started = self.epoch + Duration::from_millis(packed >> 8);
        Some((*call, now.saturating_duration_since(started)))
    }
}

/// Tells whether an error of a call counts as a failure of it.
pub(crate) trait Outcome {
    /// The code to count; `None` for "not offered" and "nothing yet".
    fn failure(&self) -> Option<Code>;
}

impl Outcome for Gap {
    fn failure(&self) -> Option<Code> {
        self.code()
    }
}

impl Outcome for Code {
    fn failure(&self) -> Option<Code> {
        (!self.is_unsupported()).then_some(*self)
    }
}

/// Runs one call: visible while it runs, timed when it returns, counted when it fails.
pub(crate) fn run<T, E: Outcome>(
    log: &CallLog,
    in_flight: Option<&InFlight>,
    call: Call,
    body: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    let start = Instant::now();
    if let Some(slot) = in_flight {
        slot.begin(call, start);
    }
    let outcome = body();
    if let Some(slot) = in_flight {
        slot.end();
    }
    log.returned(call, start.elapsed());
    if let Some(code) = outcome.as_ref().err().and_then(Outcome::failure) {
        log.failed(call, code);
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_call_can_be_named_from_outside() {
        let in_flight = InFlight::default();
        let log = CallLog::default();
        let seen = run(&log, Some(&in_flight), Call::MemoryInfo, || {
            Ok::<_, Gap>(in_flight.current(Instant::now() + Duration::from_secs(5)))
        });
        let (call, age) = seen.unwrap().unwrap();
        assert_eq!(call, Call::MemoryInfo);
        assert!(age >= Duration::from_secs(4), "{age:?}");
        assert_eq!(in_flight.current(Instant::now()), None);
    }

    #[test]
    fn calls_are_counted_and_failures_keep_their_code() {
        let log = CallLog::default();
        let _ = run(&log, None, Call::Temperature, || Ok::<_, Gap>(1));
        let lost = run::<(), Gap>(&log, None, Call::Temperature, || {
            Err(Code::GPU_IS_LOST.gap(Call::Temperature))
        });
        assert!(lost.is_err());
        let unsupported = run::<(), Gap>(&log, None, Call::Temperature, || Err(Gap::Unsupported));
        assert!(unsupported.is_err());
        let figures = log.figures();
        assert_eq!(figures.len(), 1);
        assert_eq!(figures[0].count, 3);
        assert_eq!(figures[0].cumulative[BUCKETS.len() - 1], 3);
        assert_eq!(log.failures(), vec![(Call::Temperature, Code::GPU_IS_LOST, 1)]);
    }
}
