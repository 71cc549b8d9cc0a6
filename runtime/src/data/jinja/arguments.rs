//! The evaluated arguments of a call.

use super::error::Error;
use super::text::Text;
use super::value::{Number, Value};

#[derive(Debug, Default, Clone)]
pub(super) struct Args {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(String, Value)>,
}

impl Args {
    pub(super) fn of(positional: Vec<Value>) -> Self {
        Self { positional, named: Vec::new() }
    }

    /// The arguments of `what` by the names of its parameters.
    pub(super) fn bind<const N: usize>(&self, what: &str, names: [&str; N]) -> Result<Bound<N>, Error> {
        if self.positional.len() > N {
            return Err(Error::new(format!("{what} takes {N} arguments, not {}", self.positional.len())));
        }
        let mut values = [const { None }; N];
        for (slot, value) in values.iter_mut().zip(&self.positional) {
            *slot = Some(value.clone());
        }
        for (name, value) in &self.named {
            let at = names.iter().position(|known| known == name);
            let at = at.ok_or_else(|| Error::new(format!("{what} has no argument {name}")))?;
            if values[at].replace(value.clone()).is_some() {
                return Err(Error::new(format!("{what} is given {name} twice")));
            }
        }
        Ok(Bound { what: what.to_owned(), names: names.map(str::to_owned), values })
    }
}

/// Arguments by position.
#[derive(Debug)]
pub(super) struct Bound<const N: usize> {
    what: String,
    names: [String; N],
    values: [Option<Value>; N],
}

impl<const N: usize> Bound<N> {
    /// The value, unless it is absent.
    pub(super) fn get(&self, idx: usize) -> Option<&Value> {
        self.values[idx].as_ref()
    }

    /// The value, unless it is absent or none.
    pub(super) fn given(&self, idx: usize) -> Option<&Value> {
        self.get(idx).filter(|value| !matches!(value, Value::None))
    }

    pub(super) fn required(&self, idx: usize) -> Result<&Value, Error> {
        self.get(idx).ok_or_else(|| Error::new(format!("{} needs {}", self.what, self.names[idx])))
    }

    fn wrong(&self, idx: usize, wanted: &str, found: &Value) -> Error {
        match found {
            Value::Undefined(sentence) => Error::new(&**sentence),
            _ => Error::new(format!("{} of {} must be {wanted}, not a {}", self.names[idx], self.what, found.kind())),
        }
    }

    pub(super) fn flag(&self, idx: usize) -> bool {
        self.get(idx).is_some_and(Value::is_true)
    }

    pub(super) fn int(&self, idx: usize, default: i128) -> Result<i128, Error> {
        match self.given(idx) {
            None => Ok(default),
            Some(value) => match value.number() {
                Some(Number::Int(number)) => Ok(number),
                _ => Err(self.wrong(idx, "an integer", value)),
            },
        }
    }

    /// A count within what memory can hold.
    pub(super) fn count(&self, idx: usize, default: usize) -> Result<usize, Error> {
        let number = self.int(idx, default as i128)?.max(0);
        usize::try_from(number)
            .ok()
            .filter(|number| *number <= 1 << 30)
            .ok_or_else(|| Error::new(format!("{} of {} is too large: {number}", self.names[idx], self.what)))
    }

    pub(super) fn text(&self, idx: usize) -> Result<Option<&Text>, Error> {
        match self.given(idx) {
            None => Ok(None),
            Some(Value::Str(text)) => Ok(Some(text)),
            Some(value) => Err(self.wrong(idx, "a text", value)),
        }
    }

    pub(super) fn required_text(&self, idx: usize) -> Result<&Text, Error> {
        self.required(idx)?;
        self.text(idx)?.ok_or_else(|| self.wrong(idx, "a text", &Value::None))
    }
}
