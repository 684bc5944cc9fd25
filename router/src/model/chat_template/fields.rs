//! The maps that a template sees: its variables, messages, tools.

use std::sync::Arc;

use minijinja::value::{Enumerator, Object, ObjectExt, Value};

/// Up to so many names a list costs less than to build the hash table of the engine's own maps.
const FEW: usize = 16;

/// Not more than [`FEW`] names, all different, in their order.
#[derive(Debug)]
struct Fields(Vec<(Value, Value)>);

/// A map; of equal names the last one counts.
pub(super) fn map(fields: Vec<(Value, Value)>) -> Value {
    let repeated =
        || fields.iter().enumerate().any(|(at, (name, _))| fields[..at].iter().any(|(other, _)| other == name));
    if fields.len() > FEW || repeated() {
        return Value::from_pairs(fields);
    }
    Value::from_object(Fields(fields))
}

impl Object for Fields {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        let found = self.0.iter().find(|(name, _)| name.as_str() == Some(key));
        found.map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.mapped_rev_key_value_enumerator(|this| Box::new(this.0.iter().cloned()))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.0.len())
    }
}

#[cfg(test)]
mod tests {
    use minijinja::{Environment, context};

    use super::super::python;
    use super::*;

    fn pairs(names: &[&str], map: impl Fn(Vec<(Value, Value)>) -> Value) -> Vec<(Value, Value)> {
        let inner = ("inner".into(), map(vec![("x".into(), 1.into()), ("y".into(), "text".into())]));
        names.iter().enumerate().map(|(at, name)| ((*name).into(), at.into())).chain([inner]).collect()
    }

    /// What templates do with maps, for ours and for the engine's own.
    #[test]
    fn a_template_sees_no_difference_to_the_maps_of_the_engine() {
        let many: Vec<String> = (0..2 * FEW).map(|n| format!("n{n}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let mut environment = Environment::new();
        environment.set_unknown_method_callback(python::method);
        environment.set_formatter(python::format_output);
        environment.add_filter("tojson", python::tojson);
        let uses = [
            "{{ m.b }} {{ m['a'] }} {{ m.none is defined }} {{ m[1] is defined }} {{ m | length }} {{ m is mapping }}",
            "{{ m }}",
            "{{ m | tojson }} {{ m | tojson(sort_keys=true) }}",
            "{{ m | items }} {{ dict(m, z=1) }} {{ m == other }} {{ other == m }} {{ m is iterable }}",
            "{{ m | dictsort }}",
            "{{ m | reverse | list }} {{ m | first }} {{ m | list | sort }} {{ m is string }} {{ m is sequence }}",
            "{% for name in m %}{{ name }}{{ loop.last }},{% endfor %}",
            "{% for n, v in m.items() %}{{ n }}={{ v }}{% endfor %}",
            "{{ 'a' in m }} {{ 'z' in m }} {{ m.get('b', 7) }} {{ m.get('z', 7) }}",
            "{{ m.keys() | list }} {{ m.values() | list }}",
            "{{ 'yes' if m else 'no' }} {{ [m, other] | map(attribute='inner') | list }}",
        ];
        for names in [&["b", "a", "type"][..], &[], &["a"], &["a", "b", "a"], &many] {
            let own = |pairs: Vec<(Value, Value)>| Value::from_pairs(pairs);
            let (ours, other) = (map(pairs(names, map)), own(pairs(names, own)));
            for source in uses {
                let render = |m: &Value| {
                    environment.render_str(source, context! { m, other => other.clone() }).expect("renders")
                };
                assert_eq!(render(&ours), render(&other), "{source} of {names:?}");
            }
        }
        assert_eq!(
            environment.render_str("{{ 'yes' if m else 'no' }}", context! { m => map(Vec::new()) }).expect("renders"),
            "no"
        );
    }
}
