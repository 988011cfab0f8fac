//! The index follows the repository, and its documents are those of the command line.

use std::time::Duration;

use coldrise_block::ErrorKind;
use coldrise_inventory::{Changes, Inventory, Listing, PointQuery};
use coldrise_session::{ActivityDetail, publish, seal, set_quarantine};
use coldrise_store::{
    BootCheckDocument, BootVerdict, PassphraseSource, PointSelector, ReachedStage, Repository,
    SessionName,
};

use crate::common::{FIRST_SECOND, OPEN, SIZE_BYTES, document, init, machine, point, writer};

fn open(path: &std::path::Path) -> Inventory {
    Inventory::open(path, &PassphraseSource::None, 1 << 20).unwrap()
}

/// The changes, and a check that the index equals what the command line reads.
#[track_caller]
fn refreshed(inventory: &Inventory, path: &std::path::Path) -> Changes {
    let changes = inventory.refresh().unwrap();
    let repository = Repository::open(path, &PassphraseSource::None, &OPEN).unwrap();
    let (read, _) = Listing::read(&repository, None).unwrap();
    assert_eq!(inventory.listing(None).unwrap(), read);
    assert_eq!(
        serde_json::to_string(&inventory.listing(None).unwrap()).unwrap(),
        serde_json::to_string(&read).unwrap()
    );
    changes
}

#[test]
fn each_change_shows_once_and_names_its_machine() {
    let folder = tempfile::tempdir().unwrap();
    let path = init(folder.path());
    let (web, db) = (machine("web01"), machine("db"));
    let first = writer(&path);
    first.put_point(&document(&web, 0)).unwrap();
    first.put_point(&document(&db, 1)).unwrap();
    let inventory = open(&path);
    assert!(refreshed(&inventory, &path).is_empty());

    first.put_point(&document(&web, 2)).unwrap();
    assert_eq!(refreshed(&inventory, &path).machines, std::slice::from_ref(&web));
    assert!(refreshed(&inventory, &path).is_empty());

    first.set_protected(&[(db.clone(), point(1))], true).unwrap();
    assert_eq!(refreshed(&inventory, &path).machines, std::slice::from_ref(&db));
    assert_eq!(inventory.machine(&db).unwrap().protected, 1);
    drop(first);

    let check = BootCheckDocument {
        checked_at_ms: 7,
        verdict: BootVerdict::Ok,
        until: "login".into(),
        stages: vec![ReachedStage {
            stage: "login".into(),
            after_ms: 5,
            evidence: "login:".into(),
        }],
        note: None,
        is_worse: false,
        usual_stage: None,
        failure: None,
        screen_text: None,
        serial_tail: Vec::new(),
    };
    let reader = Repository::open(&path, &PassphraseSource::None, &OPEN).unwrap();
    reader.put_boot_check(&web, &point(0), &check, Some(b"PNG")).unwrap();
    assert_eq!(refreshed(&inventory, &path).machines, std::slice::from_ref(&web));
    let summary = inventory.machine(&web).unwrap();
    assert_eq!(summary.last_boot_check, summary.last_verified_boot);
    assert_eq!(summary.last_verified_boot.unwrap().stage.as_deref(), Some("login"));
    assert_eq!(summary.boot, None);
    let exact = PointSelector::Exact(point(0));
    assert_eq!(inventory.boot_screenshot(&web, &exact).unwrap().as_deref(), Some(&b"PNG"[..]));
    assert_eq!(inventory.point(&web, &exact).unwrap().boot, Some(check.clone()));
    let worse = BootCheckDocument { verdict: BootVerdict::Failed, ..check };
    reader.put_boot_check(&web, &point(0), &worse, None).unwrap();
    assert_eq!(refreshed(&inventory, &path).machines, std::slice::from_ref(&web));
    assert_eq!(inventory.machine(&web).unwrap().last_verified_boot, None);

    let last = writer(&path);
    last.remove_points(&[(db.clone(), point(1))]).unwrap();
    assert_eq!(refreshed(&inventory, &path).machines, std::slice::from_ref(&db));
    assert_eq!(inventory.machine(&db).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn sealed_points_and_sessions_show_before_and_after_a_writer_enters_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = init(folder.path());
    let web = machine("web01");
    let first = writer(&path);
    first.put_point(&document(&web, 0)).unwrap();
    let inventory = open(&path);
    let trial = SessionName::parse("trial").unwrap();
    publish(first.repository(), &document(&web, 0), Some(trial.clone())).unwrap();
    let changes = refreshed(&inventory, &path);
    assert_eq!((changes.sessions, changes.machines), (vec!["trial".to_owned()], vec![]));
    seal(first.repository(), &trial, Duration::from_secs(10)).unwrap();
    assert_eq!(refreshed(&inventory, &path).machines, std::slice::from_ref(&web));
    let summary = inventory.machine(&web).unwrap();
    assert_eq!(summary.points, 2);
    assert!(summary.latest.unwrap().point.ends_with("+1"));
    assert_eq!(summary.last_good_backup.unwrap().point, point(0).to_string());
    assert_eq!(summary.lost, Vec::<String>::new());
    assert_eq!(coldrise_session::enter_sealed_points(&first).unwrap().points, 1);
    refreshed(&inventory, &path);
    assert_eq!(inventory.machine(&web).unwrap().points, 2);
    assert_eq!(inventory.session(&trial, ActivityDetail::Totals).unwrap().machine, "web01");
}

#[test]
fn the_last_good_point_is_neither_quarantined_nor_in_the_future() {
    let folder = tempfile::tempdir().unwrap();
    let path = init(folder.path());
    let web = machine("web01");
    let first = writer(&path);
    let years = 40 * 365 * 86_400;
    for number in [years, 0, 1] {
        first.put_point(&document(&web, number)).unwrap();
    }
    let bad = [(web.clone(), point(1))];
    set_quarantine(&first, &bad, Some(coldrise_store::Quarantine::Chosen)).unwrap();
    let inventory = open(&path);
    refreshed(&inventory, &path);
    let summary = inventory.machine(&web).unwrap();
    assert_eq!(summary.quarantined, 1);
    assert_eq!(summary.last_good.as_ref().unwrap().point, point(0).to_string());
    let now = jiff::Timestamp::now().as_second();
    let age = summary.last_good.unwrap().age_seconds as i64;
    assert!((now - FIRST_SECOND - age).abs() < 60, "{age}");
    let latest = Repository::open(&path, &PassphraseSource::None, &OPEN).unwrap();
    let latest = coldrise_session::Catalog::new(&latest).point(&web, &PointSelector::Latest(0));
    assert_eq!(summary.latest.unwrap().point, latest.unwrap().point.to_string());
    assert!(summary.warning.unwrap().contains("dated in the future"));
    assert_eq!(summary.total_bytes, 3 * SIZE_BYTES);
}

#[test]
fn pages_go_back_from_the_newest() {
    let folder = tempfile::tempdir().unwrap();
    let path = init(folder.path());
    let web = machine("web01");
    let first = writer(&path);
    (0..5).for_each(|number| first.put_point(&document(&web, number)).unwrap());
    let inventory = open(&path);
    let names = |query: &PointQuery| {
        let page = inventory.points(&web, query).unwrap();
        assert_eq!(page.total, 5);
        let names: Vec<_> = page.points.into_iter().map(|point| point.point).collect();
        (names, page.next_before)
    };
    let expected = |numbers: &[i64]| numbers.iter().map(|n| point(*n).to_string()).collect();
    let newest = PointQuery { limit: Some(2), ..PointQuery::default() };
    assert_eq!(names(&newest), (expected(&[3, 4]), Some(point(3).to_string())));
    let older = PointQuery { before: Some(point(3)), ..newest.clone() };
    assert_eq!(names(&older), (expected(&[1, 2]), Some(point(1).to_string())));
    let last = PointQuery { before: Some(point(1)), ..newest };
    assert_eq!(names(&last), (expected(&[0]), None));
    let range =
        PointQuery { after: Some(point(0)), before: Some(point(3)), ..PointQuery::default() };
    assert_eq!(names(&range), (expected(&[1, 2]), None));
    let reversed =
        PointQuery { after: Some(point(3)), before: Some(point(1)), ..PointQuery::default() };
    assert_eq!(names(&reversed), (vec![], None));
}

#[test]
fn a_lost_point_is_reported_with_the_command_to_forget_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = init(folder.path());
    let web = machine("web01");
    let first = writer(&path);
    first.put_point(&document(&web, 0)).unwrap();
    let inventory = open(&path);
    assert!(inventory.damage().unwrap().damaged.is_empty());
    let lost = format!("{web}/{}", point(9));
    first.repository().mark(&lost).unwrap();
    assert_eq!(refreshed(&inventory, &path).machines, std::slice::from_ref(&web));
    assert_eq!(inventory.machine(&web).unwrap().lost, std::slice::from_ref(&lost));
    let damage = inventory.damage().unwrap();
    assert_eq!(damage.damaged[0].what, lost);
    assert_eq!(damage.damaged[0].command, Some(format!("coldrise forget {lost}")));
}

#[test]
fn a_repository_that_is_away_or_replaced_is_named_and_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = init(folder.path());
    let web = machine("web01");
    writer(&path).put_point(&document(&web, 0)).unwrap();
    let inventory = Inventory::new(&path, &PassphraseSource::None, 0);
    assert_eq!(inventory.machines().unwrap_err().kind(), ErrorKind::NoRepository);
    assert!(inventory.refresh().unwrap().is_opened);

    let away = folder.path().join("away");
    std::fs::rename(&path, &away).unwrap();
    assert_eq!(inventory.refresh().unwrap_err().kind(), ErrorKind::NoRepository);
    assert_eq!(inventory.machines().unwrap_err().kind(), ErrorKind::NoRepository);
    assert_eq!(inventory.last_known_machines().len(), 1);

    init(folder.path());
    let error = inventory.refresh().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.full_message().contains("another repository"), "{}", error.full_message());

    std::fs::remove_dir_all(&path).unwrap();
    std::fs::rename(&away, &path).unwrap();
    let changes = inventory.refresh().unwrap();
    assert!(changes.is_opened && changes.machines.is_empty(), "{changes:?}");
    writer(&path).put_point(&document(&web, 1)).unwrap();
    assert_eq!(refreshed(&inventory, &path).machines, [web]);
}

#[test]
fn content_in_any_format_stays_though_its_point_is_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let path = init(folder.path());
    let web = machine("web01");
    let first = writer(&path);
    first.put_point(&document(&web, 0)).unwrap();
    let inventory = open(&path);
    let raw = inventory.content("web01/latest/vda").unwrap();
    assert_eq!(raw.address(), format!("web01/{}/vda", point(0)));
    assert_eq!(raw.size_bytes(), SIZE_BYTES);
    let image = inventory.content("web01/latest/vda.qcow2").unwrap();
    let leases = coldrise_session::read_leases(first.repository()).unwrap();
    assert_eq!(leases.iter().map(|lease| lease.served.len()).sum::<usize>(), 2);
    first.remove_points(&[(web, point(0))]).unwrap();
    let mut magic = [0; 4];
    image.read_at(0, &mut magic).unwrap();
    assert_eq!(&magic, b"QFI\xfb");
    let mut end = [1; 512];
    raw.read_at(SIZE_BYTES - 512, &mut end).unwrap();
    assert_eq!(end, [0; 512]);
    assert_eq!(raw.read_at(SIZE_BYTES, &mut end).unwrap_err().kind(), ErrorKind::OutOfRange);
    drop((raw, image));
    inventory.refresh().unwrap();
    let gone = inventory.content("web01/latest/vda").err().unwrap();
    assert_eq!(gone.kind(), ErrorKind::NotFound);
}
