use super::*;

const FAULT: &str = r#"<?xml version="1.0"?><E:Envelope xmlns:E="http://schemas.xmlsoap.org/soap/envelope/"
 xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"><E:Body><E:Fault><faultcode>ServerFaultCode</faultcode>
<faultstring>The name 'web01' already
 exists.</faultstring><detail><DuplicateNameFault xmlns="urn:vim25" xsi:type="DuplicateName"><name>web01</name>
<object type="VirtualMachine">vm-7</object></DuplicateNameFault></detail></E:Fault></E:Body></E:Envelope>"#;

const PROPERTIES: &str = r#"<E:Envelope xmlns:E="e" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"><E:Body>
<RetrievePropertiesResponse xmlns="urn:vim25"><returnval><obj type="HostSystem">host-1</obj>
<propSet><name>name</name><val xsi:type="xsd:string">esx&amp;1</val></propSet>
<propSet><name>datastore</name><val xsi:type="ArrayOfManagedObjectReference">
<ManagedObjectReference type="Datastore">ds-1</ManagedObjectReference>
<ManagedObjectReference type="Datastore">ds-2</ManagedObjectReference></val></propSet></returnval>
</RetrievePropertiesResponse></E:Body></E:Envelope>"#;

#[test]
fn names_cannot_leave_their_element() {
    let this = Reference::new("Folder\"/>", "group<1>");
    let text = request("RegisterVM_Task", &this, &element("name", "a</name><x>&\u{8}"));
    let document = parse(&text).unwrap();
    let this = document.descendants().find(|node| node.tag_name().name() == "_this").unwrap();
    assert_eq!(Reference::of(this), Some(Reference::new("Folder\"/>", "group<1>")));
    let name = document.descendants().find(|node| node.tag_name().name() == "name").unwrap();
    assert_eq!(name.text(), Some("a</name><x>&"));
}

#[test]
fn soap_faults_become_errors_with_advice() {
    let error = fault("RegisterVM_Task", FAULT);
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    let message = error.full_message();
    assert!(message.contains("The name 'web01' already exists. (DuplicateName)"), "{message}");
    assert!(
        message.contains("web01 is in the inventory already: give another --name"),
        "{message}"
    );
    let page = fault("Login", "<html><br></html>");
    assert!(page.full_message().contains("not the vSphere API"), "{}", page.full_message());
}

#[test]
fn properties_are_found_by_name() {
    let answer = Answer(PROPERTIES.to_owned());
    let document = answer.document().unwrap();
    let hosts: Vec<_> = objects(&document).collect();
    assert_eq!(hosts.len(), 1);
    assert_eq!(hosts[0].text("name"), "esx&1");
    let datastores = hosts[0].references("datastore");
    assert_eq!(
        datastores,
        [Reference::new("Datastore", "ds-1"), Reference::new("Datastore", "ds-2")]
    );
    assert!(hosts[0].value("parent").is_none());
}

#[test]
fn entity_bombs_are_refused() {
    let bomb = "<!DOCTYPE a [<!ENTITY b 'bb'><!ENTITY c '&b;&b;'>]><a>&c;</a>";
    assert!(Answer(bomb.to_owned()).document().is_err());
}
