use coldrise_store::Quarantine;

use super::*;

fn repository_id(digit: char) -> RepositoryId {
    serde_json::from_value(serde_json::Value::String(digit.to_string().repeat(32))).unwrap()
}

fn point(name: &str, created_at_ms: u64) -> PointDocument {
    PointDocument {
        machine: "web01".parse().unwrap(),
        point: name.parse().unwrap(),
        created_at_ms,
        origin: PointOrigin::Backup { sources: Vec::new() },
        disks: Vec::new(),
        configuration: None,
        parts: Vec::new(),
        is_protected: false,
        files: None,
        quarantine: None,
        made_in: None,
        display_name: None,
        came_by: Vec::new(),
    }
}

fn copied(point: &PointDocument, repository: RepositoryId) -> PointDocument {
    let machine = point.machine.clone();
    PointDocument { made_in: Some(MadeIn { repository, machine }), ..point.clone() }
}

const DAYS: [&str; 4] =
    ["20261101T000000Z", "20261102T000000Z", "20261103T000000Z", "20261104T000000Z"];

struct Case {
    here: RepositoryId,
    remote: RepositoryId,
    machine: MachineName,
    points: Vec<PointDocument>,
}

impl Case {
    fn new() -> Case {
        let points = DAYS.iter().zip(1..).map(|(name, at)| point(name, at)).collect();
        Case {
            here: repository_id('a'),
            remote: repository_id('b'),
            machine: "web01".parse().unwrap(),
            points,
        }
    }

    fn plan(&self, there: &[PointDocument], wanted: Wanted) -> Result<Plan> {
        let side = |repository, points| Side { repository, machine: &self.machine, points };
        Plan::make(&side(&self.here, &self.points), &side(&self.remote, there), wanted)
    }

    fn copy(&self, at: usize) -> PointDocument {
        copied(&self.points[at], self.here)
    }
}

const NEW: Wanted = Wanted { is_all: false, last: None, clock_guard: None };

#[test]
fn points_removed_at_the_target_are_not_copied_again() {
    let case = Case::new();
    assert_eq!(case.plan(&[], NEW).unwrap().missing, [0, 1, 2, 3]);
    let plan = case.plan(&[case.copy(2)], NEW).unwrap();
    assert_eq!((&plan.missing[..], &plan.passed_over[..]), (&[3][..], &[0, 1][..]));
    assert_eq!((plan.there, plan.common), (1, vec![(2, 0)]));
    let all = Wanted { is_all: true, ..NEW };
    assert_eq!(case.plan(&[case.copy(2)], all).unwrap().missing, [0, 1, 3]);
    let two = case.plan(&[], Wanted { last: Some(2), ..NEW }).unwrap();
    assert_eq!((&two.missing[..], &two.passed_over[..]), (&[2, 3][..], &[0, 1][..]));
}

#[test]
fn a_point_dated_in_the_future_keeps_no_later_one_here() {
    let mut case = Case::new();
    case.points.push(point("29991101T000000Z", 9));
    let there = [case.copy(1), case.copy(4)];
    let wanted = |last: Option<&str>| {
        let last: Option<PointName> = last.map(|name| name.parse().unwrap());
        Wanted { clock_guard: Some(ClockGuard::new(last.as_ref())), ..NEW }
    };
    let plan = case.plan(&there, wanted(Some(DAYS[3]))).unwrap();
    assert_eq!((&plan.missing[..], &plan.passed_over[..]), (&[2, 3][..], &[0][..]));
    assert_eq!((plan.there, plan.youngest), (2, Some(1)));
    // It was stored last: then it is the latest here, too.
    let plan = case.plan(&there, wanted(Some("29991101T000000Z"))).unwrap();
    assert_eq!((&plan.missing[..], plan.youngest), (&[][..], Some(4)));
}

#[test]
fn a_point_sealed_late_from_an_old_one_is_new() {
    let mut case = Case::new();
    case.points.insert(1, point("20261101T000000Z+1", 9));
    let plan = case.plan(&[copied(&case.points[4], case.here)], NEW).unwrap();
    assert_eq!(plan.missing, [1]);
}

#[test]
fn another_point_of_the_same_name_is_refused_and_no_base() {
    let case = Case::new();
    // The same name, made elsewhere; and made here, but at another time, as after a rollback of the repository.
    for other in [copied(&case.points[3], case.remote), copied(&point(DAYS[3], 77), case.here)] {
        let error = case.plan(&[case.copy(0), other], NEW).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    }
}

#[test]
fn a_copy_that_comes_back_is_recognized() {
    let case = Case::new();
    let machine = &case.machine;
    let copies: Vec<_> = (0..4).map(|at| case.copy(at)).collect();
    let here = Side { repository: &case.remote, machine, points: &copies };
    let there = Side { repository: &case.here, machine, points: &case.points };
    let plan = Plan::make(&here, &there, NEW).unwrap();
    assert_eq!((plan.there, plan.missing.len()), (4, 0));
}

#[test]
fn a_point_does_not_return_to_a_repository_through_which_it_came() {
    let (a, b, c) = (repository_id('a'), repository_id('b'), repository_id('c'));
    let own = point(DAYS[0], 1);
    let name = |text: &str| text.parse::<MachineName>().unwrap();
    assert!(places_before(&own).is_empty() && came_by(&a, &own).is_empty());
    let mut at_b = copied(&own, a);
    at_b.machine = name("a-web01");
    assert!(at_b.came_by.is_empty());
    let mut at_c = PointDocument { came_by: came_by(&b, &at_b), ..at_b.clone() };
    at_c.machine = name("b-a-web01");
    let before = places_before(&at_c);
    for (repository, machine, expected) in [
        (a, "c-b-a-web01", true),
        (b, "c-b-a-web01", true),
        // Under its name it is recognized, or restored.
        (a, "web01", false),
        (b, "a-web01", false),
        (c, "web01", false),
    ] {
        assert_eq!(comes_back(&before, &repository, &name(machine)), expected, "{machine}");
    }
    let mut far_travelled = at_c;
    for _ in 0..100 {
        far_travelled.came_by = came_by(&c, &far_travelled);
    }
    assert_eq!(far_travelled.came_by.len(), MAX_CAME_BY);
}

#[test]
fn points_in_quarantine_are_neither_copied_nor_a_base() {
    let mut case = Case::new();
    case.points[3].quarantine = Some(Quarantine::Damaged);
    let mut remote = case.copy(1);
    remote.quarantine = Some(Quarantine::Chosen);
    let plan = case.plan(&[case.copy(0), remote], NEW).unwrap();
    assert_eq!((&plan.missing[..], &plan.quarantined[..]), (&[2][..], &[3][..]));
    assert_eq!(plan.common, [(0, 0)]);
}

#[test]
fn the_base_is_the_published_point_or_the_last_one_before() {
    let case = Case::new();
    let candidates: Vec<_> = case.points.iter().collect();
    assert_eq!(base_of(&point("20261102T120000Z", 3), &candidates[..2]), Some(1));
    // Only later ones: the next.
    assert_eq!(base_of(&point("20261030T000000Z", 0), &candidates[1..]), Some(0));
    let session = "trial".parse().unwrap();
    let base = DAYS[0].parse().unwrap();
    let mut synthetic = point("20261101T000000Z+1", 9);
    synthetic.origin = PointOrigin::Synthetic { base, session, marked_at_ms: None };
    assert_eq!(base_of(&synthetic, &candidates), Some(0));
    assert_eq!(base_of(&synthetic, &candidates[1..]), Some(2));
    assert_eq!(base_of(&synthetic, &[]), None);
}
