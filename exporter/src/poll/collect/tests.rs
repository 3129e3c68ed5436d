//! Ticks of fake devices under virtual time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forewarm_nvml::fake::{Answers, FakeDevice};
use forewarm_nvml::{
    Call, Celsius, ClockDomain, Code, Device as _, Field, Gap, Hertz, Memory, Number, Ratio, Rejection,
    Scope, Utilization,
};
use forewarm_signals::Group;
use forewarm_signals::health::Reason;

use super::{Collector, Verdict};
use crate::poll::PollCounts;
use crate::snapshot::{DeviceSnapshot, Identity, Presence, Standing};

const SECOND: Duration = Duration::from_secs(1);

struct Bench {
    device: FakeDevice,
    collector: Collector,
    counts: Arc<PollCounts>,
    now: Instant,
    last_hardware_xid: Option<Instant>,
}

impl Bench {
    fn new(answers: Answers) -> Self {
        let counts = Arc::<PollCounts>::default();
        let identity = Arc::new(Identity {
            facts: answers.facts.clone().unwrap(),
            driver_version: "580.95.05".to_owned(),
        });
        Self {
            device: FakeDevice::new(1, answers),
            collector: Collector::new(0, identity, SECOND, Arc::clone(&counts)),
            counts,
            now: Instant::now(),
            last_hardware_xid: None,
        }
    }

    fn tick(&mut self) -> (DeviceSnapshot, Verdict) {
        let now = self.now;
        self.now += SECOND;
        self.collector
            .tick(&mut self.device, self.last_hardware_xid, || now)
    }

    fn rejected(&self, reason: Rejection) -> u64 {
        self.counts.rejected().find(|(of, _)| *of == reason).unwrap().1
    }
}

fn gpu() -> Answers {
    let mut answers = Answers::bare("GPU-1", "Test");
    answers.memory = Memory::checked(100, 40, 60, None);
    answers.utilization = Ok(Utilization {
        busy: Ratio::from_percent(50.0),
        memory_bandwidth: Ratio::from_percent(10.0),
    });
    answers.temperature = Celsius::from_degrees(50);
    answers
        .clocks
        .insert(ClockDomain::Sm, Hertz::from_megahertz(1000));
    answers.set(Field::POWER_INSTANT, Number::U32(70_000));
    answers.set(Field::ENERGY, Number::U64(1_000_000));
    answers
}

#[test]
fn a_tick_stays_within_its_calls() {
    let mut bench = Bench::new(gpu());
    for _ in 0..60 {
        bench.tick();
    }
    let before = bench.device.answers().calls;
    for _ in 0..300 {
        bench.tick();
    }
    let per_tick = (bench.device.answers().calls - before) as f64 / 300.0;
    assert!(per_tick < 8.0, "{per_tick} calls a tick");
}

#[test]
fn memory_is_read_every_tick() {
    let mut bench = Bench::new(gpu());
    for used in 1..40 {
        bench.device.answers().memory = Memory::checked(100, used, 100 - used, None);
        let now = bench.now;
        let (snapshot, _) = bench.tick();
        let memory = snapshot.memory.unwrap();
        assert_eq!((memory.value.used.get(), memory.at), (used, now));
    }
}

#[test]
fn a_failing_field_leaves_the_others_alone_and_its_group_ages() {
    let mut bench = Bench::new(gpu());
    let start = bench.now;
    bench.tick();
    bench.device.answers().utilization = Err(Gap::Failed {
        code: Code(10),
        call: Call::UtilizationRates,
    });
    let mut snapshot = None;
    for _ in 0..4 {
        snapshot = Some(bench.tick().0);
    }
    let snapshot = snapshot.unwrap();
    assert_eq!(
        snapshot.utilization.as_ref().unwrap().at,
        start,
        "the older reading keeps its moment"
    );
    let standing = Standing::of(&snapshot, bench.now, SECOND);
    assert!(standing.up && standing.is_fresh(Group::Memory));
    assert!(
        !standing.is_fresh(Group::Utilization),
        "and is withdrawn after three intervals"
    );
}

#[test]
fn a_rejected_value_is_absent_and_counted_while_its_neighbours_stay() {
    let mut bench = Bench::new(gpu());
    bench.device.answers().utilization = Ok(Utilization {
        busy: Ratio::from_percent(129.0),
        memory_bandwidth: Ratio::from_percent(10.0),
    });
    let (snapshot, _) = bench.tick();
    let utilization = snapshot.utilization.unwrap().value;
    assert_eq!(utilization.busy, None);
    assert!(utilization.memory_bandwidth.is_some());
    assert_eq!(bench.rejected(Rejection::AboveFull), 1);
}

#[test]
fn power_falls_back_from_average_to_instant_to_the_old_call() {
    let mut answers = gpu();
    answers.fields.remove(&(Field::POWER_INSTANT, 0));
    answers.power_usage = forewarm_nvml::Watts::from_milliwatts(42_000);
    let mut bench = Bench::new(answers);
    let watts = |bench: &mut Bench| {
        bench.tick();
        bench.tick().0.power.unwrap().value.power.unwrap().get()
    };
    assert!((watts(&mut bench) - 42.0).abs() < 1e-9);
    let mut bench = Bench::new(gpu());
    assert!((watts(&mut bench) - 70.0).abs() < 1e-9);
    let mut answers = gpu();
    answers.set(Field::POWER_AVERAGE, Number::U32(55_000));
    let mut bench = Bench::new(answers);
    assert!((watts(&mut bench) - 55.0).abs() < 1e-9);
}

#[test]
fn nvlink_rate_is_over_the_exporters_own_window() {
    let mut bench = Bench::new(gpu());
    let set = |bench: &Bench, kib| {
        bench
            .device
            .answers()
            .set_scoped(Field::NVLINK_TX_KIB, Scope::AllLinks, Number::U64(kib));
    };
    set(&bench, 1000);
    let nvlink = bench.tick().0.nvlink.unwrap().value;
    assert_eq!(nvlink.bytes.tx.unwrap().get(), 1_024_000);
    assert_eq!(nvlink.rate.tx, None, "one reading makes no rate");
    set(&bench, 3000);
    let rate = bench.tick().0.nvlink.unwrap().value.rate.tx.unwrap();
    assert!((rate.get() - 2_048_000.0).abs() < 1.0);
    set(&bench, 10);
    assert_eq!(
        bench.tick().0.nvlink.unwrap().value.rate.tx,
        None,
        "a reset makes no rate"
    );
    set(&bench, 20);
    assert!((bench.tick().0.nvlink.unwrap().value.rate.tx.unwrap().get() - 10_240.0).abs() < 1.0);
}

#[test]
fn a_lost_gpu_is_told_at_once() {
    let mut bench = Bench::new(gpu());
    bench.tick();
    bench.device.answers().fail_all(Gap::Failed {
        code: Code::GPU_IS_LOST,
        call: Call::MemoryInfo,
    });
    let (snapshot, verdict) = bench.tick();
    assert_eq!((snapshot.presence, verdict), (Presence::Lost, Verdict::Lost));
    assert!(!Standing::of(&snapshot, bench.now, SECOND).up);
}

#[test]
fn an_uninitialised_library_is_opened_anew_at_once() {
    let mut bench = Bench::new(gpu());
    bench.device.answers().fail_all(Gap::Failed {
        code: Code::UNINITIALIZED,
        call: Call::MemoryInfo,
    });
    assert_eq!(bench.tick().1, Verdict::Reopen);
}

#[test]
fn a_device_that_refuses_every_call_for_three_ticks_is_refused_and_leaves_the_library_alone() {
    for code in [Code::UNKNOWN, Code::NO_PERMISSION] {
        let mut bench = Bench::new(gpu());
        bench.tick();
        bench.device.answers().fail_all(Gap::Failed {
            code,
            call: Call::MemoryInfo,
        });
        let ticks: Vec<_> = (0..20).map(|_| bench.tick()).collect();
        let verdicts: Vec<_> = ticks.iter().map(|(_, verdict)| *verdict).collect();
        assert_eq!(verdicts[..2], [Verdict::Continue; 2]);
        assert!(verdicts.contains(&Verdict::Refused), "{code}: {verdicts:?}");
        assert!(!verdicts.contains(&Verdict::Reopen), "{code}: {verdicts:?}");
        assert_eq!(ticks.last().unwrap().0.presence, Presence::Refused);
    }
}

#[test]
fn one_unknown_error_is_no_reason_to_reopen() {
    let mut bench = Bench::new(gpu());
    bench.device.answers().utilization = Err(Gap::Failed {
        code: Code::UNKNOWN,
        call: Call::UtilizationRates,
    });
    assert!((0..20).all(|_| bench.tick().1 == Verdict::Continue));
}

#[test]
fn an_xid_lowers_health_at_the_next_tick() {
    let mut bench = Bench::new(gpu());
    let (snapshot, _) = bench.tick();
    assert!(snapshot.health.unwrap().value.reasons.is_empty());
    bench.last_hardware_xid = Some(bench.now);
    let (snapshot, _) = bench.tick();
    assert_eq!(snapshot.health.unwrap().value.reasons, [Reason::XidHardware]);
}

#[test]
fn links_are_summed_only_when_all_have_told() {
    let mut answers = gpu();
    answers.set(Field::NVLINK_COUNT, Number::U32(2));
    for link in 0..2 {
        answers.set_scoped(Field::NVLINK_STATE, Scope::Link(link), Number::U32(link));
        answers.set_scoped(Field::NVLINK_REPLAY, Scope::Link(link), Number::U64(5));
    }
    answers.set_scoped(Field::NVLINK_CRC, Scope::Link(0), Number::U64(7));
    let links = Bench::new(answers).tick().0.links.unwrap().value;
    assert_eq!(
        (links.up, links.errors.replay, links.errors.crc),
        (Some(1), Some(10), None)
    );
}

#[test]
fn a_link_that_sleeps_is_up() {
    let mut answers = gpu();
    answers.set(Field::NVLINK_COUNT, Number::U32(2));
    answers.set_scoped(Field::NVLINK_STATE, Scope::Link(0), Number::U32(1));
    answers.set_scoped(Field::NVLINK_STATE, Scope::Link(1), Number::U32(2));
    assert_eq!(Bench::new(answers).tick().0.links.unwrap().value.up, Some(2));
}

#[test]
fn advice_stands_while_the_driver_fails_to_repeat_it() {
    let mut answers = gpu();
    answers.set(Field::RECOVERY_ACTION, Number::U32(1));
    let mut bench = Bench::new(answers);
    let (snapshot, _) = bench.tick();
    let told = snapshot.health.unwrap();
    assert_eq!(told.value.reasons, [Reason::RecoveryNeeded]);
    bench
        .device
        .answers()
        .set(Field::RECOVERY_ACTION, Number::U64(u64::from(u32::MAX)));
    for _ in 0..60 {
        let health = bench.tick().0.health.unwrap();
        assert_eq!((health.at, &health.value.reasons), (told.at, &told.value.reasons));
    }
    assert!(bench.rejected(Rejection::Implausible) > 0);
    bench.device.answers().set(Field::RECOVERY_ACTION, Number::U32(0));
    let mut last = None;
    for _ in 0..31 {
        last = bench.tick().0.health;
    }
    assert!(last.unwrap().value.reasons.is_empty());
}

#[test]
fn gpm_over_a_pause_is_not_told_as_the_present_share() {
    let mut answers = gpu();
    let share = Ratio::from_percent(80.0);
    answers.gpm = Ok(forewarm_nvml::Gpm {
        sm_active: share,
        sm_occupancy: share,
        tensor_active: share,
        dram_active: share,
    });
    let mut bench = Bench::new(answers);
    let start = bench.now;
    assert_eq!(bench.tick().0.gpm.unwrap().at, start);
    bench.now += 30 * SECOND;
    assert_eq!(bench.tick().0.gpm.unwrap().at, start, "a mean over half a minute");
    let now = bench.now;
    assert_eq!(bench.tick().0.gpm.unwrap().at, now);
}

#[test]
fn every_reading_that_is_missing_or_stands_in_has_its_line_of_support() {
    let mut answers = gpu();
    answers.fields.remove(&(Field::POWER_INSTANT, 0));
    answers.power_usage = forewarm_nvml::Watts::from_milliwatts(42_000);
    answers.fabric = Ok(forewarm_nvml::Fabric {
        state: forewarm_nvml::FabricState::NotSupported,
        cluster: None,
        clique: 0,
        joined: false,
    });
    let mut bench = Bench::new(answers);
    let mut last = None;
    for _ in 0..31 {
        last = Some(bench.tick().0);
    }
    let support = last.unwrap().support;
    for line in [
        ("power-average", false),
        ("power-instant", false),
        ("power-usage", true),
        ("clock-sm", true),
        ("clock-video", false),
        ("fabric", false),
        ("gpm", false),
    ] {
        assert!(support.contains(&line), "{line:?} in {support:?}");
    }
}

#[test]
fn link_states_fall_back_to_the_old_call() {
    let mut answers = gpu();
    answers.set(Field::NVLINK_COUNT, Number::U32(2));
    answers.links.insert(0, Ok(true));
    answers.links.insert(1, Ok(false));
    answers.set(Field::NVLINK_REPLAY_TOTAL, Number::U64(9));
    let links = Bench::new(answers).tick().0.links.unwrap().value;
    assert_eq!((links.up, links.errors.replay), (Some(1), Some(9)));
}

#[test]
fn a_card_that_offers_little_is_not_dead() {
    let mut answers = Answers::bare("GPU-1", "Old");
    answers.memory = Memory::checked(100, 1, 99, None);
    let mut bench = Bench::new(answers);
    let mut last = None;
    for _ in 0..100 {
        last = Some(bench.tick());
    }
    let (snapshot, verdict) = last.unwrap();
    assert_eq!(
        (snapshot.presence, verdict),
        (Presence::Answering, Verdict::Continue)
    );
    let per_tick = bench.device.answers().calls as f64 / 100.0;
    assert!(
        per_tick < 1.5,
        "what is unsupported is not asked each tick: {per_tick}"
    );
    assert!(bench.device.facts().is_ok());
}
