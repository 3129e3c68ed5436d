package main

import (
	"fmt"
	"math"
	"regexp"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

var (
	gpuUUID = regexp.MustCompile(`^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	migUUID = regexp.MustCompile(`^MIG-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
)

// gpus walks every GPU and every MIG device on it.
func (walk *Walk) gpus() {
	count, ret := walk.lib.DeviceGetCount()
	walk.expect("DeviceGetCount", ret)
	walk.report.GPUs = count
	var all []nvml.Device
	for index := 0; index < count; index++ {
		device, ret := walk.lib.DeviceGetHandleByIndex(index)
		if walk.expect("DeviceGetHandleByIndex", ret) {
			all = append(all, device)
		}
	}
	if _, ret := walk.lib.DeviceGetHandleByIndex(count); ret != nvml.ERROR_INVALID_ARGUMENT {
		walk.complain("DeviceGetHandleByIndex(%d) of %d: %v", count, count, ret)
	}
	for index, device := range all {
		where := fmt.Sprintf("gpu %d:", index)
		walk.identity(where, index, device)
		profiles := walk.profiles(device)
		walk.getters(where, device, all, profiles)
		walk.readings(where, device)
		walk.fields(where, device)
		walk.events(where, device)
		walk.gpm(where, device, nil)
		walk.mig(where, index, device, all)
	}
}

// identity finds the GPU again by each of its names.
func (walk *Walk) identity(where string, index int, device nvml.Device) {
	uuid, ret := device.GetUUID()
	if walk.expect(where+" GetUUID", ret) && !gpuUUID.MatchString(uuid) {
		walk.complain("%s uuid %q", where, uuid)
	}
	same := func(how string, found nvml.Device, ret nvml.Return) {
		if !walk.expect(where+" "+how, ret) {
			return
		}
		if at, ret := found.GetIndex(); ret != nvml.SUCCESS || at != index {
			walk.complain("%s %s leads to %d (%v)", where, how, at, ret)
		}
	}
	found, ret := walk.lib.DeviceGetHandleByUUID(uuid)
	same("DeviceGetHandleByUUID", found, ret)
	pci, ret := device.GetPciInfo()
	if walk.expect(where+" GetPciInfo", ret) {
		found, ret = walk.lib.DeviceGetHandleByPciBusId(text(pci.BusId[:]))
		same("DeviceGetHandleByPciBusId", found, ret)
	}
	if serial, ret := device.GetSerial(); ret == nvml.SUCCESS {
		found, ret = walk.lib.DeviceGetHandleBySerial(serial)
		same("DeviceGetHandleBySerial", found, ret)
	}
}

func text[T uint8 | int8](array []T) string {
	var builder strings.Builder
	for _, char := range array {
		if char == 0 {
			break
		}
		builder.WriteByte(byte(char))
	}
	return builder.String()
}

// readings are plausible.
func (walk *Walk) readings(where string, device nvml.Device) {
	if memory, ret := device.GetMemoryInfo(); walk.expect(where+" GetMemoryInfo", ret) {
		if memory.Total == 0 || memory.Used+memory.Free != memory.Total {
			walk.complain("%s memory %+v", where, memory)
		}
	}
	if walk.has("nvmlDeviceGetMemoryInfo_v2") {
		if memory, ret := device.GetMemoryInfo_v2(); walk.expect(where+" GetMemoryInfo_v2", ret) {
			if memory.Used+memory.Free+memory.Reserved != memory.Total {
				walk.complain("%s memory %+v", where, memory)
			}
		}
	}
	if rates, ret := device.GetUtilizationRates(); ret == nvml.SUCCESS && (rates.Gpu > 100 || rates.Memory > 100) {
		walk.complain("%s utilisation %+v", where, rates)
	}
	if watts, ret := device.GetPowerUsage(); ret == nvml.SUCCESS {
		limit, ret := device.GetEnforcedPowerLimit()
		if ret != nvml.SUCCESS || watts == 0 || watts > limit {
			walk.complain("%s power %d of %d mW (%v)", where, watts, limit, ret)
		}
	}
}

// fields asks for every field id, one call for all; each answers for itself.
func (walk *Walk) fields(where string, device nvml.Device) {
	values := make([]nvml.FieldValue, 302)
	for i := range values {
		values[i].FieldId = uint32(i + 1)
	}
	if !walk.expect(where+" GetFieldValues", device.GetFieldValues(values), nvml.ERROR_NOT_SUPPORTED) {
		return
	}
	answered := 0
	for _, value := range values {
		switch nvml.Return(value.NvmlReturn) {
		case nvml.SUCCESS:
			answered++
			if value.Timestamp <= 0 {
				walk.complain("%s field %d without a time", where, value.FieldId)
			}
		case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_INVALID_ARGUMENT:
		default:
			walk.complain("%s field %d: %v", where, value.FieldId, nvml.Return(value.NvmlReturn))
		}
	}
	if answered > 0 {
		walk.answered["GetFieldValues"] = true
	}
}

// events goes through the life of a set that nothing happens to.
func (walk *Walk) events(where string, device nvml.Device) {
	kinds, ret := device.GetSupportedEventTypes()
	if !walk.expect(where+" GetSupportedEventTypes", ret) {
		return
	}
	set, ret := walk.lib.EventSetCreate()
	if !walk.expect(where+" EventSetCreate", ret) {
		return
	}
	walk.expect(where+" RegisterEvents", device.RegisterEvents(kinds, set))
	if _, ret := set.Wait(0); ret != nvml.ERROR_TIMEOUT {
		walk.complain("%s wait without events: %v", where, ret)
	}
	walk.expect(where+" EventSetFree", set.Free())
}

// gpm reads a mean over a short time, of the GPU or of one GPU instance.
func (walk *Walk) gpm(where string, device nvml.Device, instance *int) {
	if !walk.has("nvmlGpmSampleAlloc") {
		return
	}
	if support, ret := device.GpmQueryDeviceSupport(); ret != nvml.SUCCESS || support.IsSupportedDevice == 0 {
		return
	}
	var samples [2]nvml.GpmSample
	for i := range samples {
		sample, ret := walk.lib.GpmSampleAlloc()
		if !walk.expect(where+" GpmSampleAlloc", ret) {
			return
		}
		samples[i] = sample
		if instance == nil {
			walk.expect(where+" GpmSampleGet", device.GpmSampleGet(sample))
		} else {
			walk.expect(where+" GpmMigSampleGet", device.GpmMigSampleGet(*instance, sample))
		}
		// A mean needs some time to be over.
		time.Sleep(2 * time.Millisecond)
	}
	ids := []uint32{1, 2, 3, 5, 10, 20, 21, 60, 61, 62}
	request := nvml.GpmMetricsGetType{NumMetrics: uint32(len(ids)), Sample1: samples[0], Sample2: samples[1]}
	for i, id := range ids {
		request.Metrics[i].MetricId = id
	}
	if walk.expect(where+" GpmMetricsGet", walk.lib.GpmMetricsGet(&request)) {
		walk.answered["GpmMetricsGet"] = true
		for _, metric := range request.Metrics[:len(ids)] {
			bad := math.IsNaN(metric.Value) || metric.Value < 0
			if nvml.Return(metric.NvmlReturn) != nvml.SUCCESS || bad {
				walk.complain("%s gpm %d: %v, %v", where, metric.MetricId, nvml.Return(metric.NvmlReturn), metric.Value)
			}
		}
	}
	for _, sample := range samples {
		walk.expect(where+" GpmSampleFree", sample.Free())
	}
}

// profiles are the GPU instance profiles of a GPU.
func (walk *Walk) profiles(device nvml.Device) []nvml.GpuInstanceProfileInfo {
	if !walk.has("nvmlDeviceGetGpuInstanceProfileInfo") {
		return nil
	}
	var all []nvml.GpuInstanceProfileInfo
	// Profiles can be told before MIG is on; what is made by them cannot.
	if current, _, ret := device.GetMigMode(); ret != nvml.SUCCESS || current == 0 {
		return nil
	}
	for profile := 0; profile < nvml.GPU_INSTANCE_PROFILE_COUNT; profile++ {
		if info, ret := device.GetGpuInstanceProfileInfo(profile); ret == nvml.SUCCESS {
			all = append(all, info)
		}
	}
	return all
}

// mig walks the MIG devices of a GPU.
func (walk *Walk) mig(where string, index int, device nvml.Device, all []nvml.Device) {
	if !walk.has("nvmlDeviceGetMaxMigDeviceCount") {
		return
	}
	most, ret := device.GetMaxMigDeviceCount()
	walk.expect(where+" GetMaxMigDeviceCount", ret)
	for at := 0; at < most; at++ {
		mig, ret := device.GetMigDeviceHandleByIndex(at)
		if !walk.expect(where+" GetMigDeviceHandleByIndex", ret, nvml.ERROR_NOT_FOUND) {
			continue
		}
		walk.report.MIG++
		where := fmt.Sprintf("%s mig %d:", where, at)
		walk.migIdentity(where, index, at, mig)
		walk.getters(where, mig, all, nil)
		walk.readings(where, mig)
		gi, ret := mig.GetGpuInstanceId()
		if !walk.expect(where+" GetGpuInstanceId", ret) {
			continue
		}
		walk.gpm(where, mig, nil)
		walk.gpm(where, device, &gi)
		instance, ret := device.GetGpuInstanceById(gi)
		if !walk.expect(where+" GetGpuInstanceById", ret) {
			continue
		}
		if info, ret := instance.GetInfo(); !walk.expect(where+" GetInfo", ret) || int(info.Id) != gi {
			walk.complain("%s instance %d says it is %d", where, gi, info.Id)
		}
	}
}

func (walk *Walk) migIdentity(where string, parent, at int, mig nvml.Device) {
	if is, ret := mig.IsMigDeviceHandle(); ret != nvml.SUCCESS || !is {
		walk.complain("%s is no MIG device (%v)", where, ret)
	}
	if index, ret := mig.GetIndex(); ret != nvml.SUCCESS || index != at {
		walk.complain("%s index %d (%v)", where, index, ret)
	}
	uuid, ret := mig.GetUUID()
	if walk.expect(where+" GetUUID", ret) && !migUUID.MatchString(uuid) {
		walk.complain("%s uuid %q", where, uuid)
	}
	if found, ret := walk.lib.DeviceGetHandleByUUID(uuid); ret != nvml.SUCCESS || found != mig {
		walk.complain("%s by uuid is another (%v)", where, ret)
	}
	if name, ret := mig.GetName(); ret != nvml.SUCCESS || !strings.Contains(name, "MIG ") {
		walk.complain("%s name %q (%v)", where, name, ret)
	}
	up, ret := mig.GetDeviceHandleFromMigDeviceHandle()
	if walk.expect(where+" GetDeviceHandleFromMigDeviceHandle", ret) {
		if index, ret := up.GetIndex(); ret != nvml.SUCCESS || index != parent {
			walk.complain("%s is on %d (%v)", where, index, ret)
		}
	}
	if attributes, ret := mig.GetAttributes(); ret != nvml.SUCCESS || attributes.MultiprocessorCount == 0 {
		walk.complain("%s attributes %+v (%v)", where, attributes, ret)
	}
}
