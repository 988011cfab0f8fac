// A vCenter for the tests: govmomi's simulator, with what it lacks.
//
//   - localPath is a name, as for ESXi; the files are in FOLDER/NAME. The NFS server must accept connections.
//   - RemoveDatastore, refused while a machine uses the datastore.
//   - a network card in registered machines.
//   - the question whether a machine was moved or copied (command "question").
//   - tasks that wait until they may go on (command "hold").
//
// Usage: vcsim FOLDER CERTIFICATE KEY USER PASSWORD vcenter|esxi. It prints its port, then serves until its input
// ends. Input: "fault METHOD FAULT", "hold TASK", "release", "question", "clear"; each is answered with a line "ok". Calls
// that change something are printed on stderr, and "asked" for others.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"log"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25/methods"
	"github.com/vmware/govmomi/vim25/mo"
	"github.com/vmware/govmomi/vim25/soap"
	"github.com/vmware/govmomi/vim25/types"
)

type datastoreSystem struct{ *simulator.HostDatastoreSystem }

func (s *datastoreSystem) RemoveDatastore(ctx *simulator.Context, request *types.RemoveDatastore) soap.HasFault {
	ctx.Session.Registry.Remove(ctx, s.Self)
	body := new(methods.RemoveDatastoreBody)
	for _, machine := range ctx.Map.All("VirtualMachine") {
		for _, used := range machine.(*simulator.VirtualMachine).Datastore {
			if used == request.Datastore {
				body.Fault_ = simulator.Fault("in use", &types.ResourceInUse{Name: machine.Entity().Name})
				return body
			}
		}
	}
	datastore := ctx.Map.Get(request.Datastore).(*simulator.Datastore)
	simulator.RemoveReference(&s.Datastore, request.Datastore)
	s.Host.Datastore = s.Datastore
	mounts := datastore.Host[:0]
	for _, mount := range datastore.Host {
		if mount.Key != s.Host.Self {
			mounts = append(mounts, mount)
		}
	}
	datastore.Host = mounts
	if len(mounts) == 0 {
		folder := ctx.Map.Get(*datastore.Parent).(*simulator.Folder)
		ctx.Map.RemoveReference(ctx, folder, &folder.ChildEntity, request.Datastore)
		ctx.Map.Remove(ctx, request.Datastore)
	}
	body.Res = new(types.RemoveDatastoreResponse)
	return body
}

type askingMachine struct{ *simulator.VirtualMachine }

var (
	asks    bool
	answers = make(chan string, 1)
	// Protects the state that commands change.
	lock sync.Mutex
)

func choice(key, word, text string) *types.ElementDescription {
	return &types.ElementDescription{Key: key, Description: types.Description{Label: word, Summary: text}}
}

func (m *askingMachine) PowerOnVMTask(ctx *simulator.Context, request *types.PowerOnVM_Task) soap.HasFault {
	ctx.Session.Registry.Remove(ctx, m.Self)
	machine := m.VirtualMachine
	machine.Runtime.Question = &types.VirtualMachineQuestionInfo{
		Id:   "_vmx1",
		Text: "msg.uuid.altered:This virtual machine might have been moved or copied.",
		Choice: types.ChoiceOption{ChoiceInfo: []types.BaseElementDescription{
			choice("0", "button.uuid.cancel", "Cancel"),
			choice("1", "button.uuid.movedTheVM", "I _Moved It"),
			choice("2", "button.uuid.copiedTheVM", "I _Copied It"),
		}},
		Message: []types.VirtualMachineMessage{{Id: "msg.uuid.altered", Text: "moved or copied?"}},
	}
	own := &simulator.Context{Context: context.Background(), Map: ctx.Map, Session: ctx.Session}
	// Another object than the machine: its properties can be read while this waits.
	waiting := types.ManagedObjectReference{Type: "VirtualMachine", Value: "asks-" + machine.Self.Value}
	task := simulator.CreateTask(waiting, "powerOn", func(*simulator.Task) (types.AnyType, types.BaseMethodFault) {
		answer := <-answers
		log.Printf("answered %s", answer)
		if answer == "0" {
			return nil, new(types.InvalidState)
		}
		on := machine.PowerOnVMTask(own, request).(*methods.PowerOnVM_TaskBody)
		own.Map.Get(on.Res.Returnval).(*simulator.Task).Wait()
		return nil, nil
	})
	reference := task.Run(own)
	machine.RecentTask = append(machine.RecentTask, reference)
	return &methods.PowerOnVM_TaskBody{Res: &types.PowerOnVM_TaskResponse{Returnval: reference}}
}

func (m *askingMachine) AnswerVM(ctx *simulator.Context, request *types.AnswerVM) soap.HasFault {
	ctx.Session.Registry.Remove(ctx, m.Self)
	m.Runtime.Question = nil
	answers <- request.AnswerChoice
	return &methods.AnswerVMBody{Res: new(types.AnswerVMResponse)}
}

// Gives registered machines a network card: the simulator reads no .vmx.
type cards struct{ network types.ManagedObjectReference }

func (cards) Reference() types.ManagedObjectReference {
	return types.ManagedObjectReference{Type: "Cards", Value: "cards"}
}

func (c cards) PutObject(ctx *simulator.Context, object mo.Reference) {
	if task, ok := object.(*simulator.Task); ok {
		hold(ctx, task)
	}
	if machine, ok := object.(*simulator.VirtualMachine); ok {
		card := new(types.VirtualE1000e)
		card.Key, card.MacAddress = 4000, "00:0c:29:00:00:01"
		card.Backing = &types.VirtualEthernetCardNetworkBackingInfo{
			VirtualDeviceDeviceBackingInfo: types.VirtualDeviceDeviceBackingInfo{DeviceName: "VM Network"},
			Network:                        &c.network,
		}
		card.Connectable = &types.VirtualDeviceConnectInfo{StartConnected: true}
		machine.Config.Hardware.Device = append(machine.Config.Hardware.Device, card)
	}
}

func (cards) UpdateObject(*simulator.Context, mo.Reference, []types.PropertyChange) {}

func (cards) RemoveObject(*simulator.Context, types.ManagedObjectReference) {}

var (
	heldTask string
	mayGoOn  chan struct{}
)

// Lets a task of the name wait, unless it is cancelled meanwhile.
func hold(ctx *simulator.Context, task *simulator.Task) {
	lock.Lock()
	gate, name := mayGoOn, heldTask
	lock.Unlock()
	if gate == nil || task.Info.Name != name {
		return
	}
	// Another object than the machine: its properties can be read while this waits.
	if machine, ok := ctx.Map.Get(*task.Info.Entity).(*simulator.VirtualMachine); ok {
		machine.RecentTask = append(machine.RecentTask, task.Self)
	}
	task.Info.Entity = &types.ManagedObjectReference{Type: "VirtualMachine", Value: "held-" + task.Info.Entity.Value}
	execute := task.Execute
	task.Execute = func(t *simulator.Task) (types.AnyType, types.BaseMethodFault) {
		<-gate
		if t.Info.Cancelled {
			return nil, new(types.RequestCanceled)
		}
		return execute(t)
	}
}

func release() {
	lock.Lock()
	defer lock.Unlock()
	if mayGoOn != nil {
		close(mayGoOn)
		mayGoOn = nil
	}
}

// Lets the next call of this session reach another object than the simulator's own.
func standIn(ctx *simulator.Context, object mo.Reference) (mo.Reference, types.BaseMethodFault) {
	if ctx.Session != nil {
		ctx.Session.Registry.Put(object)
	}
	return nil, nil
}

// Stands before each call.
func handler(folder string) func(*simulator.Context, *simulator.Method) (mo.Reference, types.BaseMethodFault) {
	return func(ctx *simulator.Context, method *simulator.Method) (mo.Reference, types.BaseMethodFault) {
		if !strings.HasPrefix(method.Name, "Retrieve") && method.Name != "CreateContainerView" {
			log.Printf("call %s", method.Name)
		} else {
			log.Print("asked")
		}
		switch request := method.Body.(type) {
		case *types.CreateNasDatastore:
			connection, err := net.DialTimeout("tcp", net.JoinHostPort(request.Spec.RemoteHost, "2049"), time.Second)
			if err != nil {
				return nil, &types.HostConfigFault{}
			}
			connection.Close()
			request.Spec.LocalPath = filepath.Join(folder, request.Spec.LocalPath)
		case *types.RemoveDatastore:
			return standIn(ctx, &datastoreSystem{ctx.Map.Get(method.This).(*simulator.HostDatastoreSystem)})
		case *types.PowerOnVM_Task, *types.AnswerVM:
			lock.Lock()
			defer lock.Unlock()
			if asks {
				return standIn(ctx, &askingMachine{ctx.Map.Get(method.This).(*simulator.VirtualMachine)})
			}
		}
		return nil, nil
	}
}

func obey(service *simulator.Service, words []string) {
	switch words[0] {
	case "fault":
		kind, ok := types.TypeFunc()(words[2])
		if !ok {
			log.Fatalf("no fault %s", words[2])
		}
		service.AddFaultRule(&simulator.FaultInjectionRule{
			MethodName: words[1], ObjectType: "*", ObjectName: "*", Probability: 1, Enabled: true,
			FaultType: simulator.FaultTypeCustom, Message: "the test wants this",
			Fault: reflect.New(kind).Interface().(types.BaseMethodFault),
		})
	case "hold":
		// Objects can be read while a task waits.
		simulator.TaskDelay.MethodDelay = map[string]int{"LockHandoff": 0}
		lock.Lock()
		heldTask, mayGoOn = words[1], make(chan struct{})
		lock.Unlock()
	case "release":
		release()
	case "question":
		lock.Lock()
		asks = true
		lock.Unlock()
	case "clear":
		service.ClearFaultRules()
		lock.Lock()
		asks = false
		lock.Unlock()
		release()
	default:
		log.Fatalf("unknown command %s", words[0])
	}
}

func main() {
	log.SetFlags(0)
	folder, user, password := os.Args[1], os.Args[4], os.Args[5]
	certificate, err := tls.LoadX509KeyPair(os.Args[2], os.Args[3])
	if err != nil {
		log.Fatal(err)
	}
	model := simulator.VPX()
	if os.Args[6] == "esxi" {
		model = simulator.ESX()
	}
	defer model.Remove()
	if err := model.Create(); err != nil {
		log.Fatal(err)
	}
	model.Map().AddHandler(cards{model.Map().Any("Network").Reference()})
	service := model.Service
	service.Listen = &url.URL{Host: "127.0.0.1:0", User: url.UserPassword(user, password)}
	service.TLS = &tls.Config{Certificates: []tls.Certificate{certificate}}
	service.Context.Map.Handler = handler(folder)
	server := service.NewServer()
	defer server.Close()
	fmt.Println(server.URL.Port())
	input := bufio.NewScanner(os.Stdin)
	for input.Scan() {
		obey(service, strings.Fields(input.Text()))
		fmt.Println("ok")
	}
}
