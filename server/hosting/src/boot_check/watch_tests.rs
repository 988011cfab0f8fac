use coldrise_host::Host;

use super::*;
use serde_json::json;

fn goal(firmware: Firmware) -> Goal {
    let (until, has_kvm) = (BootStage::Login, false);
    Goal { until, time_limit: None, forward: None, own_check: None, firmware, has_kvm }
}

fn watch(goal: &Goal) -> Watch<'_> {
    Watch::new(goal, None, Packets::new(Host::here(), "".into()))
}

fn event(name: &str, fields: Value) -> Event {
    Event { name: name.to_owned(), unix_ms: 0, fields }
}

#[test]
fn events_are_failures_only_if_the_point_is_at_fault() {
    let goal = goal(Firmware::Bios);
    let guest = json!({ "guest": true });
    let read = json!({ "operation": "read", "node-name": "disk0", "reason": "\u{1b}I/O" });
    for (events, failure) in [
        (vec![event("SHUTDOWN", guest.clone())], Some("the machine switched itself off")),
        (vec![event("SHUTDOWN", json!({ "guest": false }))], None),
        (vec![event("RESET", guest.clone()); 2], None),
        (vec![event("RESET", guest); 3], Some("the machine restarted 3 times")),
        (vec![event("GUEST_PANICKED", Value::Null)], Some("the guest reported a panic")),
        (vec![event("BLOCK_IO_ERROR", read)], Some("a read of disk0 failed: I/O")),
        (vec![event("STOP", Value::Null)], None),
    ] {
        let mut watch = watch(&goal);
        events.iter().for_each(|event| watch.look_at_event(event).unwrap());
        assert_eq!(watch.failure.as_deref(), failure);
    }
}

#[test]
fn write_errors_do_not_fail_the_point() {
    let goal = goal(Firmware::Bios);
    for (is_full, kind) in [(true, ErrorKind::NoSpace), (false, ErrorKind::Io)] {
        let fields = json!({ "operation": "write", "nospace": is_full });
        let mut watch = watch(&goal);
        let error = watch.look_at_event(&event("BLOCK_IO_ERROR", fields)).unwrap_err();
        assert_eq!(error.kind(), kind);
        assert_eq!(watch.failure, None);
    }
}

#[test]
fn read_errors_after_a_server_restart_do_not_fail_the_point() {
    let goal = goal(Firmware::Bios);
    let mut watch = watch(&goal);
    watch.has_server_restarted = true;
    let read = json!({ "operation": "read", "node-name": "disk0" });
    let error = watch.look_at_event(&event("BLOCK_IO_ERROR", read)).unwrap_err();
    assert_eq!((error.kind(), watch.failure), (ErrorKind::ToolFailed, None));
}

#[test]
fn the_result_of_the_machines_own_check_is_used() {
    let goal = goal(Firmware::Bios);
    for (said, stage, failure) in [
        ("ok all services run\n", Some(BootStage::Service), None),
        ("hello\nokay\nok", None, None),
        ("\x1b[1mfailed no database\n", None, Some("the machine's own check: failed no database")),
    ] {
        let mut watch = watch(&goal);
        // It can arrive in pieces.
        said.bytes().for_each(|byte| watch.look_at_word(&[byte]));
        assert_eq!(watch.stages.reached().last().map(|reached| reached.stage), stage, "{said}");
        assert_eq!(watch.failure.as_deref(), failure, "{said}");
    }
}

#[test]
fn an_own_check_waits_for_its_port_or_the_login() {
    let own_check = Some(OwnCheck { text: "true".to_owned(), environment: Vec::new() });
    let forward = Some(Forward { host_port: 1, qemu_port: 1, machine_port: 22 });
    for (forward, stage, port_answers, is_ready) in [
        (None, BootStage::Userspace, false, false),
        (None, BootStage::Login, false, true),
        (forward, BootStage::Login, false, false),
        (forward, BootStage::Userspace, true, true),
    ] {
        let goal = Goal { forward, own_check: own_check.clone(), ..goal(Firmware::Bios) };
        let mut watch = watch(&goal);
        watch.stages.reach(stage, "test");
        watch.port_answers = port_answers;
        watch.look_at_own_check();
        assert_eq!(watch.running_check.is_some(), is_ready);
    }
}

#[test]
fn network_use_by_uefi_firmware_does_not_prove_a_kernel() {
    for (firmware, is_kernel) in [(Firmware::Bios, true), (Firmware::Uefi, false)] {
        let goal = goal(firmware);
        let mut watch = watch(&goal);
        let changed = event("NIC_RX_FILTER_CHANGED", Value::Null);
        watch.look_at_event(&changed).unwrap();
        assert!(!watch.stages.has(BootStage::Firmware));
        let read = json!([{ "node-name": "disk0", "stats": { "rd_bytes": 2 << 20 } }]);
        watch.look_at_disks(&read);
        watch.look_at_event(&changed).unwrap();
        assert_eq!(watch.stages.has(BootStage::Kernel), is_kernel);
        assert!(watch.stages.has(BootStage::Firmware));
    }
}

#[test]
fn a_slow_host_has_more_time() {
    let least = default_limit(false, None);
    assert!(least >= LIMIT_KVM);
    assert_eq!(default_limit(false, Some(Duration::from_secs(1))), least);
    assert_eq!(default_limit(false, Some(Duration::from_secs(100))), Duration::from_secs(2000));
    assert_eq!(default_limit(false, Some(Duration::from_secs(1000))), LONGEST_LIMIT);
}
