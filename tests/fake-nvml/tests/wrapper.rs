//! The fake as nvml-wrapper sees it: identity, readings, units and profiles.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests, outside #[test] functions"
)]

mod support;

use std::time::Duration;

use forewarm_fake_nvml::control::{EccErrors, Process, RemappedRows, Throttle};
use forewarm_fake_nvml::settings::Settings;
use forewarm_fake_nvml::{gpu_uuid, memory_time, pci_bus_id};
use nvml_wrapper::enum_wrappers::device::{
    Clock, EccCounter, MemoryError, PcieUtilCounter, PerformanceState, TemperatureSensor, TopologyLevel,
};
use nvml_wrapper::enums::device::{DeviceArchitecture, SampleValue};
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::gpm_metrics_get;
use nvml_wrapper::structs::device::FieldId;
use support::{Fake, wait_until};

#[test]
fn the_node_has_the_profiles_gpus_under_their_documented_names() {
    let fake = Fake::h100();
    let nvml = fake.nvml();
    assert_eq!(nvml.device_count().unwrap(), 8);
    assert_eq!(nvml.sys_driver_version().unwrap(), "580.95.05");
    assert_eq!(nvml.sys_cuda_driver_version().unwrap(), 13000);
    for index in 0..8 {
        let device = nvml.device_by_index(index).unwrap();
        assert_eq!(device.name().unwrap(), "NVIDIA H100 80GB HBM3");
        assert_eq!(device.uuid().unwrap(), gpu_uuid("forewarm", index));
        assert_eq!(device.index().unwrap(), index);
        assert_eq!(device.minor_number().unwrap(), index);
        assert_eq!(device.pci_info().unwrap().bus_id, pci_bus_id(index));
        assert_eq!(device.architecture().unwrap(), DeviceArchitecture::Hopper);
        assert_eq!(
            nvml.device_by_uuid(gpu_uuid("forewarm", index))
                .unwrap()
                .index()
                .unwrap(),
            index
        );
        assert_eq!(
            nvml.device_by_pci_bus_id(pci_bus_id(index))
                .unwrap()
                .index()
                .unwrap(),
            index
        );
        let short = pci_bus_id(index)[4..].to_lowercase();
        assert_eq!(nvml.device_by_pci_bus_id(short).unwrap().index().unwrap(), index);
    }
    assert!(matches!(nvml.device_by_index(8), Err(NvmlError::InvalidArg)));
    assert!(matches!(nvml.device_by_uuid("GPU-0"), Err(NvmlError::NotFound)));
}

#[test]
fn settings_change_count_seed_profile_and_driver() {
    let fake = Fake::new(Settings {
        profile: Some("t4".into()),
        gpus: Some(2),
        driver: Some("535.183.06".into()),
        uuid_seed: Some("node-7".into()),
        ..Settings::default()
    });
    let nvml = fake.nvml();
    assert_eq!(nvml.device_count().unwrap(), 2);
    assert_eq!(nvml.sys_driver_version().unwrap(), "535.183.06");
    assert_eq!(nvml.sys_nvml_version().unwrap(), "12.535.183.06");
    let device = nvml.device_by_index(1).unwrap();
    assert_eq!(device.name().unwrap(), "Tesla T4");
    assert_eq!(device.uuid().unwrap(), gpu_uuid("node-7", 1));
}

#[test]
fn readings_follow_the_control_in_nvml_units() {
    let mut fake = Fake::h100();
    fake.set(|control| {
        let gpu = control.gpu(1);
        gpu.busy = Some(0.42);
        gpu.dram = Some(0.25);
        gpu.memory_used_bytes = Some(10 << 30);
        gpu.power_watts = Some(512.25);
        gpu.temperature_celsius = Some(61.0);
        gpu.sm_clock_mhz = Some(1755);
        gpu.throttle = vec![Throttle::SwPowerCap, Throttle::HwThermal];
        gpu.pcie_rx_bytes_per_second = Some(2048.0 * 1024.0);
    });
    let nvml = fake.nvml();
    let device = nvml.device_by_index(1).unwrap();
    let rates = device.utilization_rates().unwrap();
    assert_eq!((rates.gpu, rates.memory), (42, 25));
    let memory = device.memory_info().unwrap();
    assert_eq!(memory.used, 10 << 30);
    assert_eq!(memory.total, 81559 << 20);
    assert_eq!(memory.total, memory.used + memory.free + memory.reserved);
    assert_eq!(device.power_usage().unwrap(), 512_250);
    assert_eq!(device.temperature(TemperatureSensor::Gpu).unwrap(), 61);
    assert_eq!(device.clock_info(Clock::SM).unwrap(), 1755);
    assert_eq!(device.max_clock_info(Clock::SM).unwrap(), 1980);
    assert_eq!(device.performance_state().unwrap(), PerformanceState::Zero);
    assert_eq!(device.current_throttle_reasons().unwrap().bits(), 0x44);
    assert_eq!(device.enforced_power_limit().unwrap(), 700_000);
    assert_eq!(device.pcie_throughput(PcieUtilCounter::Receive).unwrap(), 2048);

    let idle = nvml.device_by_index(0).unwrap();
    assert_eq!(idle.utilization_rates().unwrap().gpu, 0);
    assert_eq!(
        idle.current_throttle_reasons().unwrap().bits(),
        1,
        "an idle GPU says so"
    );
}

#[test]
fn utilisation_saturates_at_100() {
    let mut fake = Fake::h100();
    fake.set(|control| control.gpu(0).busy = Some(7.5));
    let nvml = fake.nvml();
    assert_eq!(
        nvml.device_by_index(0).unwrap().utilization_rates().unwrap().gpu,
        100
    );
}

#[test]
fn gpm_is_the_exact_mean_between_two_samples() {
    let mut fake = Fake::virtual_time();
    fake.set(|control| {
        control.now_ms = Some(1_000);
        let gpu = control.gpu(0);
        gpu.busy = Some(1.0);
        gpu.sm_active = Some(0.8);
        gpu.sm_occupancy = Some(0.3);
        gpu.tensor = Some(0.5);
        gpu.dram = Some(0.6);
        gpu.nvlink_rx_bytes_per_second = Some(1024.0 * 1048576.0);
        gpu.nvlink_tx_bytes_per_second = Some(512.0 * 1048576.0);
        gpu.pcie_tx_bytes_per_second = Some(2.0 * 1048576.0);
    });
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    assert!(device.gpm_support().unwrap());
    // Not the first moment of the driver, whose integrals are all 0.
    fake.set(|control| control.now_ms = Some(1_500));
    let before = device.gpm_sample().unwrap();
    fake.set(|control| {
        control.now_ms = Some(2_500);
        control.gpu(0).sm_active = Some(0.4);
    });
    // The second half runs at 0.4: the mean over both is what GPM tells.
    device.utilization_rates().unwrap();
    fake.set(|control| control.now_ms = Some(3_500));
    let after = device.gpm_sample().unwrap();
    let ids = [
        GpmMetricId::GraphicsUtil,
        GpmMetricId::SmUtil,
        GpmMetricId::SmOccupancy,
        GpmMetricId::AnyTensorUtil,
        GpmMetricId::DramBwUtil,
        GpmMetricId::PcieTxPerSec,
        GpmMetricId::NvlinkTotalRxPerSec,
        GpmMetricId::NvlinkTotalTxPerSec,
    ];
    let values: Vec<f64> = gpm_metrics_get(&nvml, &before, &after, &ids)
        .unwrap()
        .into_iter()
        .map(|result| result.unwrap().value)
        .collect();
    for (value, expected) in values
        .iter()
        .zip([100.0, 60.0, 30.0, 50.0, 60.0, 2.0, 1024.0, 512.0])
    {
        assert!((value - expected).abs() < 1e-6, "{values:?}");
    }
}

#[test]
fn a_t4_lacks_what_turing_lacks() {
    let fake = Fake::t4();
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    assert!(!device.gpm_support().unwrap());
    assert!(matches!(device.gpm_sample(), Err(NvmlError::NotSupported)));
    assert!(matches!(device.mig_mode(), Err(NvmlError::NotSupported)));
    assert!(matches!(
        device.link_wrapper_for(0).is_active(),
        Err(NvmlError::NotSupported)
    ));
    let fields = device
        .field_values_for(&[
            FieldId(138),
            FieldId(91),
            FieldId(185),
            FieldId(186),
            FieldId(142),
            FieldId(82),
        ])
        .unwrap();
    let supported: Vec<bool> = fields
        .iter()
        .map(|field| field.as_ref().unwrap().value.is_ok())
        .collect();
    assert_eq!(supported, [false, false, false, true, false, false]);
    assert!(device.is_ecc_enabled().unwrap().currently_enabled);
    assert!(device.are_pages_pending_retired().is_ok());
}

fn number(value: &SampleValue) -> u64 {
    match value {
        SampleValue::U32(value) => u64::from(*value),
        SampleValue::U64(value) => *value,
        other => panic!("{other:?}"),
    }
}

#[test]
fn fields_are_typed_and_answered_one_by_one() {
    let mut fake = Fake::virtual_time();
    fake.set(|control| {
        control.now_ms = Some(10_000);
        let gpu = control.gpu(0);
        gpu.nvlink_tx_bytes_per_second = Some(18.0 * 1024.0 * 1000.0);
        gpu.power_watts = Some(400.0);
        gpu.ecc = Some(EccErrors {
            corrected: 5,
            uncorrected: 2,
            ..EccErrors::default()
        });
        gpu.remapped_rows = Some(RemappedRows {
            uncorrectable: 1,
            pending: true,
            ..RemappedRows::default()
        });
        gpu.recovery_action = Some(1);
    });
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    fake.set(|control| control.now_ms = Some(12_000));
    let ids = [138, 83, 186, 3, 4, 143, 144, 230, 91, 164, 166, 9999];
    let fields = device.field_values_for(&ids.map(FieldId)).unwrap();
    let value = |at: usize| number(fields[at].as_ref().unwrap().value.as_ref().unwrap());
    // Scope 0 is one link of 18: 2 s at 1000 KiB/s.
    assert_eq!(value(0), 2000);
    assert_eq!(value(1), 800_000, "2 s at 400 W in mJ");
    assert_eq!(value(2), 400_000);
    assert_eq!((value(3), value(4)), (5, 2));
    assert_eq!((value(5), value(6)), (1, 1));
    assert_eq!(value(7), 1);
    assert_eq!((value(8), value(9), value(10)), (18, 26562, 6));
    assert!(matches!(
        fields[11].as_ref().unwrap().value,
        Err(NvmlError::InvalidArg)
    ));
    assert_eq!(fields[0].as_ref().unwrap().timestamp, 12_000_000);
    assert_eq!(device.total_energy_consumption().unwrap(), 800_000);
    assert_eq!(
        device
            .total_ecc_errors(MemoryError::Corrected, EccCounter::Volatile)
            .unwrap(),
        5
    );
}

#[test]
fn processes_are_listed_and_sampled_each_at_its_own_moment() {
    let mut fake = Fake::virtual_time();
    fake.set(|control| {
        control.now_ms = Some(100_000);
        control.gpu(0).processes = vec![
            Process {
                pid: 11,
                sm: 0.3,
                memory_bytes: 1 << 30,
                ..Process::default()
            },
            Process {
                pid: 12,
                sm: 0.6,
                memory_bytes: 2 << 30,
                ..Process::default()
            },
            Process {
                pid: 13,
                sm: 0.0,
                memory_bytes: 3 << 30,
                ..Process::default()
            },
        ];
    });
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    let pids: Vec<u32> = device
        .running_compute_processes()
        .unwrap()
        .iter()
        .map(|process| process.pid)
        .collect();
    assert_eq!(pids, [11, 12, 13]);
    assert!(device.running_graphics_processes().unwrap().is_empty());
    assert_eq!(device.memory_info().unwrap().used, 6 << 30);

    fake.set(|control| control.now_ms = Some(105_000));
    let samples = device.process_utilization_stats(0).unwrap();
    let busy: Vec<(u32, u32)> = samples
        .iter()
        .map(|sample| (sample.pid, sample.sm_util))
        .collect();
    assert_eq!(busy, [(11, 30), (12, 60)], "an idle process has no sample");
    assert_ne!(samples[0].timestamp, samples[1].timestamp);
    let newest = samples.iter().map(|sample| sample.timestamp).max().unwrap();
    assert!(matches!(
        device.process_utilization_stats(newest),
        Err(NvmlError::NotFound)
    ));

    // A process that exited stays in the ring for those who ask from 0, not for those who ask since the last time.
    fake.set(|control| {
        control.now_ms = Some(107_000);
        control.gpu(0).processes.clear();
    });
    assert_eq!(device.process_utilization_stats(0).unwrap().len(), 2);
    fake.set(|control| control.now_ms = Some(110_000));
    assert!(device.process_utilization_stats(109_000_000).is_err());
}

#[test]
fn sample_rings_have_real_time_stamps() {
    use nvml_wrapper::enum_wrappers::device::Sampling;
    let mut fake = Fake::virtual_time();
    fake.set(|control| {
        control.now_ms = Some(100_000);
        control.gpu(0).busy = Some(0.5);
    });
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    fake.set(|control| {
        control.now_ms = Some(102_000);
        control.gpu(0).busy = Some(1.0);
    });
    device.utilization_rates().unwrap();
    fake.set(|control| control.now_ms = Some(104_000));
    let ring = device.samples(Sampling::GpuUtilization, 100_000_000).unwrap();
    assert!(ring.len() >= 20, "4 s at 6 samples a second: {}", ring.len());
    assert!(ring.windows(2).all(|pair| pair[0].timestamp < pair[1].timestamp));
    for sample in &ring {
        let expected = if sample.timestamp < 102_000_000 { 50 } else { 100 };
        assert_eq!(number(&sample.value), expected, "at {}", sample.timestamp);
    }
    assert!(matches!(
        device.samples(Sampling::GpuUtilization, 104_000_000),
        Err(NvmlError::NotFound)
    ));
}

#[test]
fn links_and_topology_are_those_of_an_hgx_board() {
    let mut fake = Fake::h100();
    fake.set(|control| control.gpu(0).nvlink_links_down = vec![3]);
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    assert!(device.link_wrapper_for(0).is_active().unwrap());
    assert!(!device.link_wrapper_for(3).is_active().unwrap());
    assert!(matches!(
        device.link_wrapper_for(18).is_active(),
        Err(NvmlError::InvalidArg)
    ));
    let level = |other| {
        device
            .topology_common_ancestor(nvml.device_by_index(other).unwrap())
            .unwrap()
    };
    assert_eq!(level(0), TopologyLevel::Internal);
    assert_eq!(level(3), TopologyLevel::Node);
    assert_eq!(level(4), TopologyLevel::System);
    assert_eq!(
        device.topology_nearest_gpus(TopologyLevel::Node).unwrap().len(),
        3
    );
}

#[test]
fn used_memory_can_be_the_time_of_the_call() {
    let mut fake = Fake::h100();
    fake.set(|control| control.encode_time_in_memory = true);
    let nvml = fake.nvml();
    let device = nvml.device_by_index(5).unwrap();
    let now_ms = || {
        let since = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap();
        u64::try_from(since.as_millis()).unwrap()
    };
    let before = now_ms();
    let memory = device.memory_info().unwrap();
    let after = now_ms();
    let told = memory_time::decode(memory.used, after, memory.total - memory.reserved);
    assert!((before..=after).contains(&told), "{before} ≤ {told} ≤ {after}");
}

#[test]
fn each_call_costs_what_the_settings_say() {
    let fake = Fake::new(Settings {
        call_cost_us: Some(300),
        ..Settings::default()
    });
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    let started = std::time::Instant::now();
    for _ in 0..20 {
        device.utilization_rates().unwrap();
    }
    assert!(
        started.elapsed() >= Duration::from_micros(20 * 300),
        "{:?}",
        started.elapsed()
    );
}

#[test]
fn a_change_of_the_control_is_read_within_100_ms() {
    let mut fake = Fake::h100();
    let nvml = fake.nvml();
    let device = nvml.device_by_index(0).unwrap();
    assert_eq!(device.utilization_rates().unwrap().gpu, 0);
    // The quickest of several tries: a loaded machine may stall one, not all.
    let quickest = (1..=5)
        .map(|step| {
            let busy = f64::from(step) / 10.0;
            fake.set(|control| control.gpu(0).busy = Some(busy));
            wait_until("the change is seen", || {
                device.utilization_rates().unwrap().gpu == step * 10
            })
        })
        .min();
    assert!(quickest < Some(Duration::from_millis(100)), "{quickest:?}");
}
