//! Requests and answers of the vSphere API as text: SOAP 1.1, elements in the order of its schema.

use coldrise_block::{Error, ErrorKind, Result};
use roxmltree::{Document, Node, ParsingOptions};
use serde::{Deserialize, Serialize};

pub(super) use crate::libvirt::escaped;

/// Maximum number of elements and attributes of an answer.
const MAX_NODES: u32 = 1_000_000;
/// Maximum length of a server's message, in characters.
const MAX_SHOWN_CHARS: usize = 400;
const XSI: &str = "http://www.w3.org/2001/XMLSchema-instance";

/// A managed object, such as `VirtualMachine vm-42`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reference {
    /// Its type.
    pub kind: String,
    /// Its id on the server.
    pub id: String,
}

impl Reference {
    pub(super) fn new(kind: &str, id: &str) -> Reference {
        Reference { kind: kind.to_owned(), id: id.to_owned() }
    }

    /// The reference that an element has.
    pub(super) fn of(node: Node<'_, '_>) -> Option<Reference> {
        Some(Reference::new(node.attribute("type")?, node.text()?.trim()))
    }

    /// As an element.
    pub(super) fn element(&self, tag: &str) -> String {
        format!("<{tag} type=\"{}\">{}</{tag}>", escaped(&self.kind), escaped(&self.id))
    }
}

/// A text element.
pub(super) fn element(tag: &str, text: &str) -> String {
    format!("<{tag}>{}</{tag}>", escaped(text))
}

/// A whole request.
pub(super) fn request(method: &str, this: &Reference, body: &str) -> String {
    let this = this.element("_this");
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\
         <soapenv:Envelope xmlns:soapenv=\"http://schemas.xmlsoap.org/soap/envelope/\" \
         xmlns:xsi=\"{XSI}\"><soapenv:Body><{method} xmlns=\"urn:vim25\">{this}{body}</{method}>\
         </soapenv:Body></soapenv:Envelope>"
    )
}

/// The text of an answer that is not a fault.
pub(super) struct Answer(pub(super) String);

impl Answer {
    /// Parses it. A document type is refused, and with it all entities but the five of XML.
    pub(super) fn document(&self) -> Result<Document<'_>> {
        parse(&self.0)
    }
}

fn parse(text: &str) -> Result<Document<'_>> {
    let parsing = ParsingOptions { nodes_limit: MAX_NODES, ..ParsingOptions::default() };
    Document::parse_with_options(text, parsing).map_err(|error| {
        let text = "the answer is not XML, so this is not the vSphere API";
        Error::with_source(ErrorKind::Unsupported, text, error)
    })
}

/// The child of this name.
pub(super) fn child<'a, 'i>(node: Node<'a, 'i>, name: &str) -> Option<Node<'a, 'i>> {
    node.children().find(|child| child.tag_name().name() == name)
}

/// The text of the child of this name.
pub(super) fn child_text<'a>(node: Node<'a, '_>, name: &str) -> Option<&'a str> {
    child(node, name)?.text().map(str::trim)
}

/// The type of an element's value, without its prefix.
pub(super) fn type_of<'a>(node: Node<'a, '_>) -> &'a str {
    let name = node.attribute((XSI, "type")).unwrap_or_default();
    name.rsplit_once(':').map_or(name, |(_, name)| name)
}

/// An element of an answer as part of a request.
pub(super) fn copied(node: Node<'_, '_>) -> String {
    let tag = node.tag_name().name();
    let attribute = |name, value: &str| match value {
        "" => String::new(),
        value => format!(" {name}=\"{}\"", escaped(value)),
    };
    let kind = attribute("xsi:type", type_of(node));
    let reference = attribute("type", node.attribute("type").unwrap_or_default());
    let content = match node.children().any(|child| child.is_element()) {
        true => node.children().filter(Node::is_element).map(copied).collect(),
        false => escaped(node.text().unwrap_or_default()),
    };
    format!("<{tag}{kind}{reference}>{content}</{tag}>")
}

/// The first `returnval` of an answer.
pub(super) fn returned<'a, 'i>(document: &'a Document<'i>) -> Option<Node<'a, 'i>> {
    document.descendants().find(|node| node.tag_name().name() == "returnval")
}

/// The objects of an answer of the property collector.
pub(super) fn objects<'a, 'i>(
    document: &'a Document<'i>,
) -> impl Iterator<Item = PropertySet<'a, 'i>> {
    document.descendants().filter(|node| node.tag_name().name() == "returnval").filter_map(|node| {
        Some(PropertySet { reference: Reference::of(child(node, "obj")?)?, node })
    })
}

/// The properties of one object.
pub(super) struct PropertySet<'a, 'i> {
    pub(super) reference: Reference,
    node: Node<'a, 'i>,
}

impl<'a, 'i> PropertySet<'a, 'i> {
    /// The value of a property; `None` if it is not set.
    pub(super) fn value(&self, name: &str) -> Option<Node<'a, 'i>> {
        let sets = self.node.children().filter(|child| child.tag_name().name() == "propSet");
        let mut found = sets.filter(|set| child_text(*set, "name") == Some(name));
        child(found.next()?, "val")
    }

    /// Its text, or nothing.
    pub(super) fn text(&self, name: &str) -> String {
        self.value(name).and_then(|node| node.text()).unwrap_or_default().trim().to_owned()
    }

    /// The references of a property that is a list.
    pub(super) fn references(&self, name: &str) -> Vec<Reference> {
        let children = self.value(name).into_iter().flat_map(|node| node.children());
        children.filter(Node::is_element).filter_map(Reference::of).collect()
    }
}

/// The error of an answer that is a fault.
pub(super) fn fault(method: &str, text: &str) -> Error {
    let document = match parse(text) {
        Ok(document) => document,
        Err(error) => return error.context(method),
    };
    let find = |name| document.descendants().find(|node| node.tag_name().name() == name);
    let message = find("faultstring").and_then(|node| node.text()).unwrap_or_default();
    let detail = find("detail").and_then(|detail| detail.first_element_child());
    let name = detail.map_or("", |detail| match type_of(detail) {
        "" => detail.tag_name().name().trim_end_matches("Fault"),
        name => name,
    });
    named_fault(method, name, message, detail)
}

/// The error of a task, from its property `info.error`.
pub(super) fn task_fault(method: &str, error: Node<'_, '_>) -> Error {
    let message = child_text(error, "localizedMessage").unwrap_or_default();
    let fault = child(error, "fault");
    named_fault(method, fault.map_or("", type_of), message, fault)
}

fn named_fault(method: &str, name: &str, message: &str, detail: Option<Node<'_, '_>>) -> Error {
    let more = |tag| detail.and_then(|detail| child_text(detail, tag)).unwrap_or_default();
    let (kind, advice) = match name {
        "InvalidLogin" => (
            ErrorKind::Unauthorized,
            "the user name or the password is wrong; vCenter's users have a domain, such as \
             backup@vsphere.local"
                .to_owned(),
        ),
        "NoPermission" => {
            let privilege = more("privilegeId");
            (ErrorKind::Forbidden, format!("the user lacks the privilege {privilege}"))
        }
        "DuplicateName" => (
            ErrorKind::AlreadyExists,
            format!("{} is in the inventory already: give another --name", more("name")),
        ),
        "AlreadyExists" => (ErrorKind::AlreadyExists, String::new()),
        "ManagedObjectNotFound" | "NotFound" | "FileNotFound" => {
            (ErrorKind::NotFound, String::new())
        }
        "ResourceInUse" | "TaskInProgress" | "InvalidPowerState" | "InvalidState" => {
            (ErrorKind::Busy, String::new())
        }
        "NotSupported" | "RestrictedVersion" | "LicenseRestricted" | "MethodNotFound" => {
            (ErrorKind::Unsupported, String::new())
        }
        "RequestCanceled" => (ErrorKind::Interrupted, String::new()),
        _ => (ErrorKind::ToolFailed, String::new()),
    };
    let message = shown(message);
    let text = match (name, message.is_empty() || message.ends_with(name)) {
        ("", _) => format!("{method} failed: {message}"),
        (name, true) => format!("{method} failed: {name}"),
        (name, false) => format!("{method} failed: {message} ({name})"),
    };
    let error = Error::new(kind, text);
    if advice.is_empty() { error } else { error.advise(advice) }
}

/// The beginning of a server's message on one line, without control characters.
pub(super) fn shown(message: &str) -> String {
    let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
    message.chars().filter(|c| !c.is_control()).take(MAX_SHOWN_CHARS).collect()
}

#[cfg(test)]
#[path = "soap_tests.rs"]
mod tests;
