// Command gonvml walks a library that calls itself NVML with NVIDIA's Go client.
//
// Usage: gonvml LIBRARY. It calls every getter that the client offers and the library has, on every GPU and MIG device,
// with every argument that makes sense, and checks what can be checked without knowing the hardware. One JSON object on
// stdout says what was answered; complaints make it exit with 1.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"sort"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Report is what a walk found.
type Report struct {
	Driver string `json:"driver"`
	GPUs   int    `json:"gpus"`
	MIG    int    `json:"mig"`
	// Calls made.
	Calls int `json:"calls"`
	// Getters that succeeded at least once, on a GPU or a MIG device.
	Answered []string `json:"answered"`
	// Getters of the client whose symbol the library lacks.
	Absent []string `json:"absent"`
	// What no library should answer.
	Complaints []string `json:"complaints"`
}

// Walk is a walk under way.
type Walk struct {
	lib      nvml.Interface
	report   Report
	answered map[string]bool
	absent   map[string]bool
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: gonvml LIBRARY")
		os.Exit(64)
	}
	walk := &Walk{
		lib:      nvml.New(nvml.WithLibraryPath(os.Args[1])),
		answered: map[string]bool{},
		absent:   map[string]bool{},
	}
	if ret := walk.lib.Init(); ret != nvml.SUCCESS {
		fmt.Fprintf(os.Stderr, "gonvml: %s: init: %v\n", os.Args[1], ret)
		os.Exit(1)
	}
	walk.system()
	walk.gpus()
	if ret := walk.lib.Shutdown(); ret != nvml.SUCCESS {
		walk.complain("shutdown: %v", ret)
	}
	walk.report.Answered = keys(walk.answered)
	walk.report.Absent = keys(walk.absent)
	if err := json.NewEncoder(os.Stdout).Encode(walk.report); err != nil {
		fmt.Fprintln(os.Stderr, "gonvml:", err)
		os.Exit(1)
	}
	if len(walk.report.Complaints) > 0 {
		os.Exit(1)
	}
}

func keys(set map[string]bool) []string {
	list := make([]string, 0, len(set))
	for key := range set {
		list = append(list, key)
	}
	sort.Strings(list)
	return list
}

func (walk *Walk) complain(format string, args ...any) {
	walk.report.Complaints = append(walk.report.Complaints, fmt.Sprintf(format, args...))
}

// has tells whether the library exports a symbol: calling one that it lacks would end this process.
func (walk *Walk) has(symbol string) bool {
	return walk.lib.Extensions().LookupSymbol(symbol) == nil
}

// expect complains unless a call answered one of the codes; success is always fine.
func (walk *Walk) expect(what string, ret nvml.Return, others ...nvml.Return) bool {
	walk.report.Calls++
	if ret == nvml.SUCCESS {
		return true
	}
	for _, other := range others {
		if ret == other {
			return false
		}
	}
	walk.complain("%s: %v (%d)", what, ret, int(ret))
	return false
}

// system asks for what is no GPU's.
func (walk *Walk) system() {
	driver, ret := walk.lib.SystemGetDriverVersion()
	walk.expect("SystemGetDriverVersion", ret)
	walk.report.Driver = driver
	version, ret := walk.lib.SystemGetNVMLVersion()
	if walk.expect("SystemGetNVMLVersion", ret) && version == "" {
		walk.complain("SystemGetNVMLVersion: empty")
	}
	cuda, ret := walk.lib.SystemGetCudaDriverVersion_v2()
	if walk.expect("SystemGetCudaDriverVersion_v2", ret) && cuda < 11000 {
		walk.complain("SystemGetCudaDriverVersion_v2: %d", cuda)
	}
	name, ret := walk.lib.SystemGetProcessName(os.Getpid())
	if walk.expect("SystemGetProcessName", ret) && name == "" {
		walk.complain("SystemGetProcessName: empty")
	}
	for code := 0; code <= 29; code++ {
		if text := walk.lib.ErrorString(nvml.Return(code)); text == "" {
			walk.complain("ErrorString(%d): empty", code)
		}
	}
	walk.systemEvents()
}

// systemEvents goes through the life of a set that nothing happens to.
func (walk *Walk) systemEvents() {
	if !walk.has("nvmlSystemEventSetCreate") {
		walk.absent["SystemEventSetCreate"] = true
		return
	}
	create := nvml.SystemEventSetCreateRequest{}
	create.Version = nvml.STRUCT_VERSION(create, 1)
	if !walk.expect("SystemEventSetCreate", walk.lib.SystemEventSetCreate(&create)) {
		return
	}
	register := nvml.SystemRegisterEventRequest{EventTypes: 3, Set: create.Set}
	register.Version = nvml.STRUCT_VERSION(register, 1)
	walk.expect("SystemRegisterEvents", walk.lib.SystemRegisterEvents(&register))
	var data [4]nvml.SystemEventData_v1
	// The client passes the pointer on as it is, so the array must not move.
	var pinner runtime.Pinner
	defer pinner.Unpin()
	pinner.Pin(&data[0])
	wait := nvml.SystemEventSetWaitRequest{Set: create.Set, Data: &data[0], DataSize: uint32(len(data))}
	wait.Version = nvml.STRUCT_VERSION(wait, 1)
	if ret := walk.lib.SystemEventSetWait(&wait); ret != nvml.ERROR_TIMEOUT {
		walk.complain("SystemEventSetWait without events: %v", ret)
	}
	free := nvml.SystemEventSetFreeRequest{Set: create.Set}
	free.Version = nvml.STRUCT_VERSION(free, 1)
	if walk.expect("SystemEventSetFree", walk.lib.SystemEventSetFree(&free)) {
		walk.answered["SystemEventSetCreate"] = true
	}
}
