use super::*;

#[test]
fn addresses_survive_parse_and_display() {
    for text in [
        "web01/latest/vda",
        "web01/latest~1",
        "live/trial1/vda",
        "live/trial1",
        "a/20261120T100000Z+12/sda.1",
        "0/19700101T000000Z",
        "a/20240229T235959Z",
    ] {
        assert_eq!(Address::parse(text).unwrap().to_string(), text);
    }
    let Address::Point { machine, selector, disk } = Address::parse("web01/latest~3/vda").unwrap()
    else {
        panic!("a point");
    };
    assert_eq!((machine.as_str(), selector), ("web01", PointSelector::Latest(3)));
    assert_eq!(disk.unwrap().as_str(), "vda");
}

#[test]
fn malformed_addresses_are_refused_with_the_reason() {
    let long = format!("{}/latest", "a".repeat(64));
    for text in [
        "",
        "web01",
        "web01/",
        "/latest",
        "web01/latest/",
        "web01/latest/vda/x",
        "../latest",
        "web01/..",
        "web01/latest/..",
        "web01/latest/a/../b",
        "web01/latest/\0",
        "Web01/latest",
        "web01/latest~0",
        "web01/latest~01",
        "web01/latest~",
        "web01/latest~9999999",
        "web01/latest1",
        "live/latest~1",
        "live/",
        "web01/20260230T000000Z",
        "web01/20261120T250000Z",
        "web01/20261120T100060Z",
        "web01/19691231T235959Z",
        "web01/20261120T100000Z+0",
        "web01/20261120T100000Z+01",
        "web01/20261120T100000Z+",
        "web01/20261120T100000Z+4294967296",
        "web01/20261120T100000Z+1+1",
        "web01/2026112\u{0660}T100000Z",
        long.as_str(),
    ] {
        let error = Address::parse(text).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{text:?}");
        assert!(error.to_string().contains("use ") || error.to_string().contains("allowed"));
    }
    assert!(MachineName::parse("live").is_err());
    assert!(DiskName::parse("live").is_ok());
    assert!(MachineName::parse(&"a".repeat(63)).is_ok());
}

#[test]
fn points_sort_by_time_and_then_by_number() {
    let sorted = [
        "19991231T235959Z",
        "20261120T100000Z",
        "20261120T100000Z+2",
        "20261120T100000Z+10",
        "20261120T100001Z",
    ];
    let names: Vec<PointName> = sorted.iter().map(|s| PointName::parse(s).unwrap()).collect();
    for pair in names.windows(2) {
        assert!(pair[0] < pair[1]);
        assert!(pair[0].sort_key() < pair[1].sort_key());
    }
}

#[test]
fn a_synthetic_point_of_a_synthetic_point_keeps_the_time() {
    let first = PointName::from_time("2026-11-20T10:00:00.9Z".parse().unwrap()).unwrap();
    assert_eq!(first.as_str(), "20261120T100000Z");
    assert_eq!(first.lineage(), ("20261120T100000Z", 0));
    let sealed = first.synthetic(1).unwrap();
    assert_eq!(sealed.as_str(), "20261120T100000Z+1");
    assert_eq!(sealed.synthetic(2).unwrap().as_str(), "20261120T100000Z+2");
    assert_eq!(sealed.lineage(), ("20261120T100000Z", 1));
    assert!(first.synthetic(0).is_err());
}

#[test]
fn names_are_checked_when_deserialised_too() {
    assert!(serde_json::from_str::<MachineName>("\"..\"").is_err());
    assert!(serde_json::from_str::<PointName>("\"20261120T100000Z+0\"").is_err());
    let name: MachineName = serde_json::from_str("\"web01\"").unwrap();
    assert_eq!(serde_json::to_string(&name).unwrap(), "\"web01\"");
}

#[test]
fn a_sort_key_gives_its_name_back() {
    for text in ["19700101T000000Z", "20240229T235959Z", "20261120T100000Z+7", "99991230T000000Z"] {
        let name = PointName::parse(text).unwrap();
        assert_eq!(PointName::from_sort_key(&name.sort_key()), Some(name));
    }
    assert_eq!(PointName::from_sort_key(&[255; 12]), None);
}
