//! The parts of a machine beside its disks, from a point through a session into the next point.

use coldrise_session::{Session, publish, seal, unpublish, update_parts};
use coldrise_store::{
    FIRMWARE_VARIABLES, MachinePart, PointDocument, RAW, SWTPM_PERMALL, TPM_STATE,
};

use crate::support::{PATIENCE, name, place, writer};

fn variables(content: &[u8]) -> MachinePart {
    MachinePart::new(FIRMWARE_VARIABLES, RAW, content).unwrap()
}

#[test]
fn a_seal_takes_the_parts_as_the_machine_left_them() {
    let place = place();
    let tpm = MachinePart::new(TPM_STATE, SWTPM_PERMALL, b"keys").unwrap();
    let base = PointDocument { parts: vec![variables(b"old"), tpm.clone()], ..place.point.clone() };
    writer(&place.path).replace_points(std::slice::from_ref(&base)).unwrap();
    let repository = place.open();
    let trial = name("trial");
    publish(&repository, &base, Some(trial.clone())).unwrap();
    // Another process serves the session meanwhile.
    let open = Session::open(&repository, &trial).unwrap();
    update_parts(&repository, &trial, vec![variables(b"new")]).unwrap();
    let sealed = open.seal().unwrap().point;
    drop(open);
    assert_eq!(sealed.part(FIRMWARE_VARIABLES).unwrap().content().unwrap(), b"new");
    assert_eq!(sealed.part(TPM_STATE), Some(&tpm));
    let again = seal(&repository, &trial, PATIENCE).unwrap().point;
    assert_eq!(again.parts, sealed.parts);
    // An end without changes makes no point; one with changed variables does.
    assert!(unpublish(&repository, &trial, false).unwrap().is_none());
    publish(&repository, &base, Some(trial.clone())).unwrap();
    update_parts(&repository, &trial, vec![variables(b"last")]).unwrap();
    let last = unpublish(&repository, &trial, false).unwrap().unwrap().point;
    assert_eq!(last.part(FIRMWARE_VARIABLES), Some(&variables(b"last")));
    drop(repository);
    // A writer enters them into the catalog, which has them like the sessions before.
    coldrise_session::enter_sealed_points(&writer(&place.path)).unwrap();
    let points = place.open().points(&base.machine).unwrap();
    assert_eq!(points, [base, sealed, again, last]);
}
