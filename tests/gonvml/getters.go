package main

import (
	"reflect"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// A getter changes nothing; whatever begins otherwise is left alone.
var getterPrefixes = []string{"Get", "Is", "OnSameBoard", "GpmQuery"}

// Methods that need more than arguments: walked by hand, in gpu.go.
var byHand = map[string]bool{
	"GetFieldValues": true,
}

// Methods for which the client picks the newest version that the library has.
var pickedByVersion = map[string][]string{
	"GetPciInfo":                       {"", "_v2", "_v3"},
	"GetNvLinkRemotePciInfo":           {"", "_v2"},
	"GetAttributes":                    {"", "_v2"},
	"GetComputeRunningProcesses":       {"", "_v2", "_v3"},
	"GetGraphicsRunningProcesses":      {"", "_v2", "_v3"},
	"GetMPSComputeRunningProcesses":    {"", "_v2", "_v3"},
	"GetGpuInstancePossiblePlacements": {"", "_v2"},
	"GetDriverModel":                   {"", "_v2"},
}

// Symbols that are not called as their method is.
var symbolOf = map[string]string{
	"GpmQueryDeviceSupport":  "nvmlGpmQueryDeviceSupport",
	"GpmQueryDeviceSupportV": "nvmlGpmQueryDeviceSupport",
	"GetProcessUtilization":  "nvmlDeviceGetProcessUtilization",
}

func isGetter(name string) bool {
	for _, prefix := range getterPrefixes {
		if strings.HasPrefix(name, prefix) {
			return !byHand[name]
		}
	}
	return false
}

// available tells whether the library has the symbol that a method of a device calls.
func (walk *Walk) available(method string) bool {
	if symbol, ok := symbolOf[method]; ok {
		return walk.has(symbol)
	}
	base := "nvmlDevice" + method
	if strings.HasPrefix(method, "Gpm") {
		base = "nvml" + method
	}
	for _, suffix := range pickedByVersion[method] {
		if walk.has(base + suffix) {
			return true
		}
	}
	return walk.has(base)
}

// numbers are the values that an integer parameter of a method is tried with.
func numbers(method string) []int {
	switch {
	case strings.HasPrefix(method, "GetNvLink"):
		return upTo(18)
	case method == "GetMigDeviceHandleByIndex":
		return upTo(8)
	case strings.HasPrefix(method, "GetGpuInstanceProfileInfo"):
		return upTo(17)
	case method == "GetGpuInstanceById":
		return upTo(15)
	default:
		return upTo(1)
	}
}

func upTo(end int) []int {
	list := make([]int, end)
	for i := range list {
		list[i] = i
	}
	return list
}

// values are what a parameter is tried with; none for a type that the walk cannot make.
func (walk *Walk) values(method string, parameter reflect.Type, others []nvml.Device, profiles []nvml.GpuInstanceProfileInfo) []reflect.Value {
	of := func(list []int) []reflect.Value {
		made := make([]reflect.Value, len(list))
		for i, number := range list {
			made[i] = reflect.ValueOf(number).Convert(parameter)
		}
		return made
	}
	switch parameter {
	case reflect.TypeFor[int]():
		return of(numbers(method))
	case reflect.TypeFor[nvml.ClockType](), reflect.TypeFor[nvml.ClockId]():
		return of(upTo(4))
	case reflect.TypeFor[nvml.TemperatureSensors]():
		return of(upTo(1))
	case reflect.TypeFor[nvml.TemperatureThresholds](), reflect.TypeFor[nvml.MemoryLocation]():
		return of(upTo(8))
	case reflect.TypeFor[nvml.MemoryErrorType](), reflect.TypeFor[nvml.EccCounterType](),
		reflect.TypeFor[nvml.PcieUtilCounter](), reflect.TypeFor[nvml.PageRetirementCause]():
		return of(upTo(2))
	case reflect.TypeFor[nvml.PerfPolicyType]():
		return of([]int{0, 1, 2, 3, 4, 5, 10, 11})
	case reflect.TypeFor[nvml.NvLinkCapability]():
		return of(upTo(6))
	case reflect.TypeFor[nvml.NvLinkErrorCounter](), reflect.TypeFor[nvml.GpuP2PCapsIndex]():
		return of(upTo(5))
	case reflect.TypeFor[nvml.GpuTopologyLevel]():
		return of([]int{0, 10, 20, 30, 40, 50})
	case reflect.TypeFor[nvml.SamplingType]():
		return of(upTo(10))
	case reflect.TypeFor[uint64]():
		return of(upTo(1))
	case reflect.TypeFor[uint32]():
		return of([]int{4242})
	case reflect.TypeFor[nvml.Device]():
		made := make([]reflect.Value, len(others))
		for i, other := range others {
			made[i] = reflect.ValueOf(other)
		}
		return made
	case reflect.TypeFor[*nvml.GpuInstanceProfileInfo]():
		made := make([]reflect.Value, len(profiles))
		for i := range profiles {
			made[i] = reflect.ValueOf(&profiles[i])
		}
		return made
	}
	return nil
}

// combinations are all rows of one value for each parameter.
func combinations(columns [][]reflect.Value) [][]reflect.Value {
	rows := [][]reflect.Value{{}}
	for _, column := range columns {
		var longer [][]reflect.Value
		for _, row := range rows {
			for _, value := range column {
				longer = append(longer, append(append([]reflect.Value{}, row...), value))
			}
		}
		rows = longer
	}
	return rows
}

// outcome finds the return code among results, or calls every version that a handler offers.
func outcome(results []reflect.Value) []nvml.Return {
	if len(results) == 0 {
		return nil
	}
	last := results[len(results)-1]
	if ret, ok := last.Interface().(nvml.Return); ok {
		return []nvml.Return{ret}
	}
	var all []nvml.Return
	for i := 0; i < last.NumMethod(); i++ {
		if method := last.Method(i); method.Type().NumIn() == 0 {
			all = append(all, outcome(method.Call(nil))...)
		}
	}
	return all
}

// getters calls every getter of a device. What may be refused, and how, depends on the method.
func (walk *Walk) getters(where string, device nvml.Device, others []nvml.Device, profiles []nvml.GpuInstanceProfileInfo) {
	kind := reflect.TypeFor[nvml.Device]()
	bound := reflect.ValueOf(device)
	for i := 0; i < kind.NumMethod(); i++ {
		name := kind.Method(i).Name
		if !isGetter(name) {
			continue
		}
		method := bound.MethodByName(name)
		if !walk.available(name) {
			walk.absent[name] = true
			continue
		}
		columns := make([][]reflect.Value, method.Type().NumIn())
		for p := range columns {
			columns[p] = walk.values(name, method.Type().In(p), others, profiles)
		}
		for _, row := range combinations(columns) {
			for _, ret := range outcome(method.Call(row)) {
				if walk.expect(where+" "+name, ret, refusals(name)...) {
					walk.answered[name] = true
				}
			}
		}
	}
}

// refusals are the codes that a healthy library may answer besides success.
func refusals(method string) []nvml.Return {
	some := []nvml.Return{nvml.ERROR_NOT_SUPPORTED}
	switch method {
	case "GetProcessUtilization", "GetSamples", "GetAccountingStats", "GetMigDeviceHandleByIndex", "GetGpuInstanceById":
		some = append(some, nvml.ERROR_NOT_FOUND, nvml.ERROR_INVALID_ARGUMENT)
	case "GetProcessesUtilizationInfo":
		// The client offers no array, so it never gets further.
		some = append(some, nvml.ERROR_NOT_FOUND, nvml.ERROR_INSUFFICIENT_SIZE)
	case "GetGpuFabricInfoV":
		// Older drivers do not know every layout.
		some = append(some, nvml.ERROR_ARGUMENT_VERSION_MISMATCH)
	case "GetComputeInstanceId", "GetGpuInstanceId", "GetDeviceHandleFromMigDeviceHandle":
		some = append(some, nvml.ERROR_INVALID_ARGUMENT)
	}
	if strings.HasPrefix(method, "GetNvLink") {
		some = append(some, nvml.ERROR_INVALID_ARGUMENT)
	}
	return some
}
