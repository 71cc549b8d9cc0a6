//! From the columns of tables to records.
//!
//! A table has every field of a struct in every row, so a field that an object lacks is null there. Such nulls are left out, as in
//! the peers: a model would learn to write them. The messages of a conversation keep theirs, because the content of an answer that
//! is all calls is null on purpose; whoever reads messages leaves out the others. Values of JSON columns stay as they were written.
//! A value inside a message that JSON has no type for refuses the record; other columns of such types are left out.

use std::path::Path;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, ArrowTemporalType, Date32Type, Date64Type, Decimal128Type, Decimal256Type, Float16Type,
    Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, Time32MillisecondType, Time32SecondType,
    Time64MicrosecondType, Time64NanosecondType, TimestampMicrosecondType, TimestampMillisecondType,
    TimestampNanosecondType, TimestampSecondType, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, MapArray, RecordBatch, StructArray};
use arrow_schema::{DataType, Field, Fields, TimeUnit};
use serde_json::{Map, Value};

use super::input::Expansion;
use super::{BATCH_BYTES, Content, DECODED_BYTES_MAX, LeftOut, Numbered, ReadError, STORED_BYTES, VALUE_BYTES, json};
use crate::data::exact_json;

/// The type of a column whose texts are JSON, in its metadata.
const EXTENSION: (&str, &str) = ("ARROW:extension:name", "arrow.json");

/// Rows of a file that are not records yet.
pub(super) struct Rows {
    batch: Option<RecordBatch>,
    next_row: usize,
    /// Number of the next record in the file, from 1.
    next_record: u64,
    /// The columns with the messages of conversations.
    messages: Vec<String>,
    expansion: Expansion,
}

/// Why a row is no record.
enum Refusal {
    /// It does not fit into memory.
    TooLarge,
    /// A field inside a message has a value of a type that JSON does not have.
    Type { field: String, kind: String },
}

/// Turns elements of columns into JSON until it has too many bytes.
struct Converter<'a> {
    messages: &'a [String],
    /// Whether the column has messages.
    is_in_messages: bool,
    n_bytes: u64,
    /// Bytes of a table that repeats nothing.
    n_stored: u64,
}

impl Rows {
    pub(super) fn new(messages: &[String], expansion: Expansion) -> Self {
        Self { batch: None, next_row: 0, next_record: 1, messages: messages.to_owned(), expansion }
    }

    /// Number of the next record in the file, from 1.
    pub(super) const fn next_record(&self) -> u64 {
        self.next_record
    }

    /// Adds rows after the last one was taken.
    pub(super) fn put(&mut self, batch: RecordBatch) {
        (self.batch, self.next_row) = (Some(batch), 0);
    }

    /// The next records, as many as a batch of records may have; none if all rows are taken.
    pub(super) fn take(&mut self, path: &Path) -> Result<Vec<Numbered>, ReadError> {
        let (mut records, mut n_bytes) = (Vec::new(), 0);
        let Some(batch) = &self.batch else { return Ok(records) };
        while self.next_row < batch.num_rows() && n_bytes < BATCH_BYTES as u64 {
            let mut converter = Converter { messages: &self.messages, is_in_messages: false, n_bytes: 0, n_stored: 0 };
            let line = self.next_record;
            let content = match (converter.record(batch, self.next_row), path.to_owned()) {
                (Ok(record), _) => Content::Fields(Value::Object(record)),
                // A small file can have many of these, and each takes as long as it is large.
                (Err(Refusal::TooLarge), path) => {
                    return Err(ReadError::TooLarge { path, line, limit_mib: DECODED_BYTES_MAX >> 20 });
                }
                (Err(Refusal::Type { field, kind }), path) => {
                    Content::Refused(ReadError::Type { path, line, field, kind })
                }
            };
            records.push(Numbered { line, content });
            self.expansion.spend(converter.n_stored)?;
            n_bytes += converter.n_bytes;
            (self.next_row, self.next_record) = (self.next_row + 1, line + 1);
        }
        if self.next_row == batch.num_rows() {
            self.batch = None;
        }
        Ok(records)
    }
}

impl Converter<'_> {
    fn spend(&mut self, n_bytes: u64) -> Result<(), Refusal> {
        self.n_bytes += n_bytes;
        if self.n_bytes > DECODED_BYTES_MAX { Err(Refusal::TooLarge) } else { Ok(()) }
    }

    fn record(&mut self, batch: &RecordBatch, row: usize) -> Result<Map<String, Value>, Refusal> {
        let mut record = Map::new();
        for (field, column) in batch.schema_ref().fields().iter().zip(batch.columns()) {
            self.is_in_messages = self.messages.contains(field.name());
            if let Some(value) = self.value(field, &**column, row, self.is_in_messages)? {
                self.spend(field.name().len() as u64)?;
                record.insert(field.name().clone(), value);
            }
        }
        Ok(record)
    }

    /// An element of a column as JSON; nothing if JSON has no such type and the column has no messages. `keeps_nulls` is whether an object, or the objects of a
    /// list, keep fields without a value.
    fn value(
        &mut self,
        field: &Field,
        column: &dyn Array,
        row: usize,
        keeps_nulls: bool,
    ) -> Result<Option<Value>, Refusal> {
        self.spend(VALUE_BYTES)?;
        self.n_stored += STORED_BYTES;
        if column.is_null(row) {
            return Ok(Some(Value::Null));
        }
        Ok(match column.data_type() {
            DataType::Null => Some(Value::Null),
            DataType::Boolean => Some(Value::Bool(column.as_boolean().value(row))),
            DataType::Utf8 => Some(self.text(field, column.as_string::<i32>().value(row))?),
            DataType::LargeUtf8 => Some(self.text(field, column.as_string::<i64>().value(row))?),
            DataType::Utf8View => Some(self.text(field, column.as_string_view().value(row))?),
            DataType::List(item) => self.list(item, &column.as_list::<i32>().value(row), keeps_nulls)?,
            DataType::LargeList(item) => self.list(item, &column.as_list::<i64>().value(row), keeps_nulls)?,
            DataType::FixedSizeList(item, _) => {
                self.list(item, &column.as_fixed_size_list().value(row), keeps_nulls)?
            }
            DataType::ListView(item) => self.list(item, &column.as_list_view::<i32>().value(row), keeps_nulls)?,
            DataType::LargeListView(item) => self.list(item, &column.as_list_view::<i64>().value(row), keeps_nulls)?,
            DataType::Struct(_) => Some(Value::Object(self.object(column.as_struct(), row, keeps_nulls)?)),
            DataType::Dictionary(..) => {
                let Some(dictionary) = column.as_any_dictionary_opt() else { return Ok(None) };
                let key = number_of(dictionary.keys(), row).and_then(|key| usize::try_from(key.as_u64()?).ok());
                match key {
                    Some(key) => self.value(field, &**dictionary.values(), key, keeps_nulls)?,
                    None => None,
                }
            }
            DataType::Map(..) => self.map(column.as_map(), row)?,
            other => match number_of(column, row).or_else(|| text_of(column, row)) {
                None if self.is_in_messages => {
                    return Err(Refusal::Type { field: field.name().clone(), kind: name_of(other) });
                }
                value => value,
            },
        })
    }

    /// An object of the entries of a map, whose keys are texts or become them.
    fn map(&mut self, maps: &MapArray, row: usize) -> Result<Option<Value>, Refusal> {
        let entries = maps.value(row);
        let [keys, values] = [0, 1].map(|i| (&entries.fields()[i], entries.column(i)));
        let mut object = Map::new();
        for entry in 0..entries.len() {
            let key = self.value(keys.0, &**keys.1, entry, false)?;
            let value = self.value(values.0, &**values.1, entry, false)?;
            let (Some(key), Some(value)) = (key, value) else { return Ok(None) };
            object.insert(key.as_str().map_or_else(|| key.to_string(), str::to_owned), value);
        }
        Ok(Some(Value::Object(object)))
    }

    fn text(&mut self, field: &Field, text: &str) -> Result<Value, Refusal> {
        let parsed = match is_json(field) {
            true => {
                self.spend(json::decoded_bytes(text.as_bytes()))?;
                exact_json::value(text)
            }
            false => None,
        };
        self.n_stored += text.len() as u64;
        self.spend(text.len() as u64)?;
        Ok(parsed.unwrap_or_else(|| Value::String(text.to_owned())))
    }

    fn list(&mut self, item: &Field, items: &ArrayRef, keeps_nulls: bool) -> Result<Option<Value>, Refusal> {
        let mut list = Vec::new();
        for row in 0..items.len() {
            let Some(value) = self.value(item, &**items, row, keeps_nulls)? else { return Ok(None) };
            list.push(value);
        }
        Ok(Some(Value::Array(list)))
    }

    fn object(&mut self, array: &StructArray, row: usize, keeps_nulls: bool) -> Result<Map<String, Value>, Refusal> {
        let mut object = Map::new();
        for (field, column) in array.fields().iter().zip(array.columns()) {
            let is_absent = column.is_null(row) || *column.data_type() == DataType::Null;
            if is_absent && !keeps_nulls {
                continue;
            }
            if let Some(value) = self.value(field, &**column, row, false)? {
                self.spend(field.name().len() as u64)?;
                object.insert(field.name().clone(), value);
            }
        }
        Ok(object)
    }
}

/// A number of a column of numbers.
fn number_of(column: &dyn Array, row: usize) -> Option<Value> {
    fn number<T: ArrowPrimitiveType<Native: Into<Value>>>(column: &dyn Array, row: usize) -> Option<Value> {
        Some(column.as_primitive::<T>().value(row).into())
    }
    match column.data_type() {
        DataType::Int8 => number::<Int8Type>(column, row),
        DataType::Int16 => number::<Int16Type>(column, row),
        DataType::Int32 => number::<Int32Type>(column, row),
        DataType::Int64 => number::<Int64Type>(column, row),
        DataType::UInt8 => number::<UInt8Type>(column, row),
        DataType::UInt16 => number::<UInt16Type>(column, row),
        DataType::UInt32 => number::<UInt32Type>(column, row),
        DataType::UInt64 => number::<UInt64Type>(column, row),
        DataType::Float16 => {
            let number = f32::from(column.as_primitive::<Float16Type>().value(row));
            not_finite(f64::from(number)).or_else(|| Some(number.into()))
        }
        DataType::Float32 => not_finite(f64::from(column.as_primitive::<Float32Type>().value(row)))
            .or_else(|| number::<Float32Type>(column, row)),
        DataType::Float64 => {
            not_finite(column.as_primitive::<Float64Type>().value(row)).or_else(|| number::<Float64Type>(column, row))
        }
        _ => None,
    }
}

/// NaN and infinities as Python's JSON has them.
fn not_finite(number: f64) -> Option<Value> {
    let text = match number {
        f64::INFINITY => "Infinity",
        f64::NEG_INFINITY => "-Infinity",
        number if number.is_nan() => "NaN",
        _ => return None,
    };
    exact_json::value(text)
}

/// A date, a time or a decimal number as JSON has them: texts in the form of ISO 8601, and the digits. `datasets` makes dates of texts
/// that look like one, so they go back to texts.
fn text_of(column: &dyn Array, row: usize) -> Option<Value> {
    fn date<T: ArrowTemporalType>(column: &dyn Array, row: usize) -> Option<String>
    where
        i64: From<T::Native>,
    {
        Some(column.as_primitive::<T>().value_as_date(row)?.to_string())
    }
    fn time<T: ArrowTemporalType>(column: &dyn Array, row: usize) -> Option<String>
    where
        i64: From<T::Native>,
    {
        Some(column.as_primitive::<T>().value_as_time(row)?.to_string())
    }
    fn instant<T: ArrowTemporalType>(column: &dyn Array, row: usize, zone: Option<&str>) -> Option<String>
    where
        i64: From<T::Native>,
    {
        // Arrow stores instants of a zone in UTC; the name of another zone would need its table of offsets.
        let mark = if zone.is_some() { "Z" } else { "" };
        Some(format!("{:?}{mark}", column.as_primitive::<T>().value_as_datetime(row)?))
    }
    let text = match column.data_type() {
        DataType::Date32 => date::<Date32Type>(column, row),
        DataType::Date64 => date::<Date64Type>(column, row),
        DataType::Time32(TimeUnit::Second) => time::<Time32SecondType>(column, row),
        DataType::Time32(_) => time::<Time32MillisecondType>(column, row),
        DataType::Time64(TimeUnit::Microsecond) => time::<Time64MicrosecondType>(column, row),
        DataType::Time64(_) => time::<Time64NanosecondType>(column, row),
        DataType::Timestamp(unit, zone) => {
            let instant = match unit {
                TimeUnit::Second => instant::<TimestampSecondType>,
                TimeUnit::Millisecond => instant::<TimestampMillisecondType>,
                TimeUnit::Microsecond => instant::<TimestampMicrosecondType>,
                TimeUnit::Nanosecond => instant::<TimestampNanosecondType>,
            };
            instant(column, row, zone.as_deref())
        }
        DataType::Decimal128(..) => {
            return exact_json::value(&column.as_primitive::<Decimal128Type>().value_as_string(row));
        }
        DataType::Decimal256(..) => {
            return exact_json::value(&column.as_primitive::<Decimal256Type>().value_as_string(row));
        }
        _ => None,
    };
    text.map(Value::String)
}

fn is_json(field: &Field) -> bool {
    field.metadata().get(EXTENSION.0).is_some_and(|name| name == EXTENSION.1)
}

/// Whether a type without types inside it becomes a value.
fn is_read(data_type: &DataType) -> bool {
    use DataType as D;
    matches!(data_type, D::Null | D::Boolean | D::Utf8 | D::LargeUtf8 | D::Utf8View)
        || matches!(data_type, D::Float16 | D::Float32 | D::Float64 | D::Decimal128(..) | D::Decimal256(..))
        || matches!(data_type, D::Date32 | D::Date64 | D::Time32(_) | D::Time64(_) | D::Timestamp(..))
        || data_type.is_integer()
}

/// The columns, and fields of structs in columns, that records lack because JSON has no such type.
pub(super) fn left_out(fields: &Fields) -> Vec<LeftOut> {
    let mut found = Vec::new();
    for field in fields {
        collect_left_out(field.name(), field.data_type(), &mut found);
    }
    found
}

fn collect_left_out(name: &str, data_type: &DataType, found: &mut Vec<LeftOut>) {
    match data_type {
        DataType::Struct(fields) => {
            fields.iter().for_each(|field| collect_left_out(field.name(), field.data_type(), found));
        }
        DataType::List(item)
        | DataType::LargeList(item)
        | DataType::FixedSizeList(item, _)
        | DataType::ListView(item)
        | DataType::LargeListView(item)
        | DataType::Map(item, _) => {
            collect_left_out(name, item.data_type(), found);
        }
        DataType::Dictionary(_, values) => collect_left_out(name, values, found),
        other if is_read(other) => {}
        other => found.push(LeftOut { name: name.to_owned(), kind: name_of(other) }),
    }
}

/// The name of a type that is not read.
fn name_of(data_type: &DataType) -> String {
    match data_type {
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView | DataType::FixedSizeBinary(_) => {
            "binary".to_owned()
        }
        other => other.to_string(),
    }
}

/// The leaf columns of a Parquet file whose values become values of records, or refuse them, in the order of its leaves, and how many
/// leaves there are.
pub(super) fn leaves_that_are_read(fields: &Fields, messages: &[String]) -> (Vec<usize>, usize) {
    fn visit(data_type: &DataType, all: bool, n_leaves: &mut usize, read: &mut Vec<usize>) {
        match data_type {
            DataType::Struct(fields) => fields.iter().for_each(|field| visit(field.data_type(), all, n_leaves, read)),
            DataType::List(item)
            | DataType::LargeList(item)
            | DataType::FixedSizeList(item, _)
            | DataType::Map(item, _) => visit(item.data_type(), all, n_leaves, read),
            other => {
                let is_read = match other {
                    DataType::Dictionary(_, values) => is_read(values),
                    other => is_read(other),
                };
                read.extend((is_read || all).then_some(*n_leaves));
                *n_leaves += 1;
            }
        }
    }
    let (mut n_leaves, mut read) = (0, Vec::new());
    for field in fields {
        visit(field.data_type(), messages.contains(field.name()), &mut n_leaves, &mut read);
    }
    (read, n_leaves)
}

/// The fields of a Parquet file as they are read. Texts are views of what was read: one that the file stores once is in memory once,
/// however many rows have it. `is_json` tells whether a leaf column holds JSON, which a file may say without Arrow's metadata.
pub(super) fn as_read(fields: &Fields, is_json: &dyn Fn(usize) -> bool) -> Fields {
    let mut n_leaves = 0;
    fields.iter().map(|field| field_as_read(field, is_json, &mut n_leaves)).collect()
}

fn field_as_read(field: &Field, is_json: &dyn Fn(usize) -> bool, n_leaves: &mut usize) -> Arc<Field> {
    let mut item = |item: &Field| field_as_read(item, is_json, n_leaves);
    let data_type = match field.data_type() {
        DataType::Struct(fields) => DataType::Struct(fields.iter().map(|field| item(field)).collect()),
        DataType::List(inner) => DataType::List(item(inner)),
        DataType::LargeList(inner) => DataType::LargeList(item(inner)),
        DataType::FixedSizeList(inner, n) => DataType::FixedSizeList(item(inner), *n),
        DataType::Map(inner, _) => {
            item(inner);
            field.data_type().clone()
        }
        leaf => {
            let nth = *n_leaves;
            *n_leaves += 1;
            let mut read = field.clone();
            if is_json(nth) {
                read.metadata_mut().insert(EXTENSION.0.to_owned(), EXTENSION.1.to_owned());
            }
            let is_text = matches!(leaf, DataType::Utf8 | DataType::LargeUtf8);
            return Arc::new(if is_text { read.with_data_type(DataType::Utf8View) } else { read });
        }
    };
    Arc::new(field.clone().with_data_type(data_type))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::data_file::DataFile;
    use arrow_array::builder::{ListBuilder, MapBuilder, StringBuilder};
    use arrow_array::{
        Date32Array, Decimal128Array, DurationSecondArray, Float32Array, Float64Array, Int64Array, ListArray,
        ListViewArray, NullArray, StringArray, Time32SecondArray, TimestampSecondArray,
    };
    use arrow_buffer::OffsetBuffer;
    use serde_json::json;
    use std::collections::HashMap;

    fn field(name: &str, array: &ArrayRef) -> Arc<Field> {
        Arc::new(Field::new(name, array.data_type().clone(), true))
    }

    fn json_field(name: &str) -> Arc<Field> {
        let metadata = HashMap::from([(EXTENSION.0.to_owned(), EXTENSION.1.to_owned())]);
        Arc::new(Field::new(name, DataType::Utf8, true).with_metadata(metadata))
    }

    fn texts(texts: &[Option<&str>]) -> ArrayRef {
        Arc::new(StringArray::from(texts.to_vec()))
    }

    fn object(columns: &[(&str, ArrayRef)]) -> ArrayRef {
        let columns: Vec<_> = columns.iter().map(|(name, array)| (field(name, array), Arc::clone(array))).collect();
        Arc::new(StructArray::from(columns))
    }

    /// All items as one list.
    fn list_of(item: Arc<Field>, items: ArrayRef) -> ArrayRef {
        Arc::new(ListArray::new(item, OffsetBuffer::from_lengths([items.len()]), items, None))
    }

    fn list(items: ArrayRef) -> ArrayRef {
        list_of(field("item", &items), items)
    }

    fn records(columns: &[(&str, ArrayRef)]) -> Result<Vec<Value>, ReadError> {
        let fields: Vec<_> = columns.iter().map(|(name, array)| field(name, array)).collect();
        let arrays = columns.iter().map(|(_, array)| Arc::clone(array)).collect();
        taken(RecordBatch::try_new(Arc::new(arrow_schema::Schema::new(fields)), arrays).unwrap())
    }

    fn new_rows() -> Rows {
        let file = tempfile::NamedTempFile::new().unwrap();
        Rows::new(&["messages".to_owned()], Expansion::of_records(&DataFile::open(file.path()).unwrap()))
    }

    fn taken(batch: RecordBatch) -> Result<Vec<Value>, ReadError> {
        let mut rows = new_rows();
        rows.put(batch);
        let path = Path::new("a.parquet");
        rows.take(path)?.into_iter().map(|numbered| numbered.into_value(path)).collect()
    }

    #[test]
    fn fields_that_other_objects_of_a_column_have_are_left_out() {
        let properties =
            object(&[("a", texts(&[Some("x"), None])), ("b", Arc::new(Int64Array::from(vec![None, Some(3)])))]);
        let calls = list(object(&[("arguments", Arc::clone(&properties)), ("id", texts(&[None, Some("1")]))]));
        let tools = list(object(&[
            ("function", object(&[("properties", properties)])),
            ("strict", Arc::new(NullArray::new(2))),
        ]));
        let messages =
            list(object(&[("role", texts(&[Some("assistant")])), ("content", texts(&[None])), ("tool_calls", calls)]));

        let records = records(&[("messages", messages), ("tools", tools), ("text", texts(&[None]))]).unwrap();

        let calls = json!([{ "arguments": { "a": "x" } }, { "arguments": { "b": 3 }, "id": "1" }]);
        let tools =
            json!([{ "function": { "properties": { "a": "x" } } }, { "function": { "properties": { "b": 3 } } }]);
        let message = json!({ "role": "assistant", "content": null, "tool_calls": calls });
        assert_eq!(records, [json!({ "messages": [message], "tools": tools, "text": null })]);
    }

    #[test]
    fn json_columns_are_the_values_that_were_written() {
        let written = [Some(r#"{"b": null, "n": 1000000000000000000001}"#), None, Some("no json"), Some("[1]")];
        let items = list_of(json_field("item"), texts(&written));
        let inner = StructArray::from(vec![(json_field("arguments"), texts(&[Some(r#"{"c": null}"#)]))]);
        let fields = vec![
            json_field("whole"),
            field("items", &items),
            Arc::new(Field::new("call", inner.data_type().clone(), true)),
        ];
        let columns: Vec<ArrayRef> = vec![texts(&[Some(r#"{"a": [null]}"#)]), items, Arc::new(inner)];

        let records =
            taken(RecordBatch::try_new(Arc::new(arrow_schema::Schema::new(fields)), columns).unwrap()).unwrap();

        let number = exact_json::value("1000000000000000000001").unwrap();
        let items = json!([{ "b": null, "n": number }, null, "no json", [1]]);
        assert_eq!(
            records,
            [json!({ "whole": { "a": [null] }, "items": items, "call": { "arguments": { "c": null } } })]
        );
    }

    #[test]
    fn dates_decimals_and_maps_are_what_json_has_for_them() {
        let mut maps = MapBuilder::new(None, StringBuilder::new(), StringBuilder::new());
        maps.keys().append_value("city");
        maps.values().append_value("Ulm");
        maps.append(true).unwrap();
        let decimals = Decimal128Array::from(vec![12345]).with_precision_and_scale(9, 2).unwrap();
        let seconds = TimestampSecondArray::from(vec![1_704_067_200]);
        let inner = object(&[
            ("day", Arc::new(Date32Array::from(vec![19_723]))),
            ("at", Arc::new(seconds.clone())),
            ("at_utc", Arc::new(seconds.with_timezone("UTC"))),
            ("time", Arc::new(Time32SecondArray::from(vec![3_661]))),
            ("price", Arc::new(decimals)),
            ("where", Arc::new(maps.finish())),
        ]);

        let records = records(&[("arguments", inner)]).unwrap();

        let price = exact_json::value("123.45").unwrap();
        let wanted = json!({
            "day": "2024-01-01", "at": "2024-01-01T00:00:00", "at_utc": "2024-01-01T00:00:00Z", "time": "01:01:01",
            "price": price, "where": { "city": "Ulm" },
        });
        assert_eq!(records, [json!({ "arguments": wanted })]);
    }

    #[test]
    fn value_in_a_message_that_no_json_has_refuses_its_record() {
        let spans: ArrayRef = Arc::new(DurationSecondArray::from(vec![None, Some(60)]));
        let rows = |spans: ArrayRef| {
            records(&[("messages", list(object(&[("span", spans.clone())]))), ("other", list(spans))])
        };

        let refused = rows(Arc::clone(&spans)).unwrap_err().to_string();

        assert!(refused.starts_with("a.parquet:1: field \"span\" of a message has the type Duration(s)"), "{refused}");
        assert_eq!(rows(spans.slice(0, 1)).unwrap(), [json!({ "messages": [{ "span": null }], "other": [null] })]);
    }

    #[test]
    fn numbers_that_are_not_finite_keep_their_value() {
        let numbers = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.5];
        let wide: ArrayRef = Arc::new(Float64Array::from(numbers.to_vec()));
        let narrow: ArrayRef = Arc::new(Float32Array::from(numbers.map(|number| number as f32).to_vec()));

        for column in [wide, narrow] {
            let wanted = exact_json::value(r#"{ "a": [NaN, Infinity, -Infinity, 0.5] }"#);

            assert_eq!(records(&[("a", list(column))]).unwrap(), wanted.as_slice());
        }
    }

    #[test]
    fn views_of_lists_are_lists() {
        let items: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3]));
        let views = ListViewArray::new(field("item", &items), vec![1].into(), vec![2].into(), items, None);

        let records = records(&[("a", Arc::new(views) as ArrayRef)]).unwrap();

        assert_eq!(records, [json!({ "a": [2, 3] })]);
    }

    #[test]
    fn record_that_a_column_repeats_into_the_memory_is_refused() {
        let n_items = usize::try_from(DECODED_BYTES_MAX / VALUE_BYTES).unwrap() + 1;

        let refused = records(&[("a", list(Arc::new(NullArray::new(n_items))))]).unwrap_err().to_string();

        assert!(refused.contains("a.parquet:1: this record is larger than 1024 MiB"), "{refused}");
    }

    #[test]
    fn text_that_a_small_file_has_in_every_row_is_refused() {
        let text = "a".repeat(1 << 20);
        let keys = arrow_array::Int8Array::from(vec![0; 100]);
        let column = arrow_array::DictionaryArray::new(keys, texts(&[Some(&text)]));
        let mut rows = new_rows();
        rows.put(RecordBatch::try_from_iter([("text", Arc::new(column) as ArrayRef)]).unwrap());

        let refused = (0..100).find_map(|_| rows.take(Path::new("a")).err()).unwrap().to_string();

        assert!(refused.contains("expands to more than 1000 times its size"), "{refused}");
    }

    #[test]
    fn batch_ends_where_its_records_are_large_in_memory() {
        let text = "a".repeat(BATCH_BYTES / 2);
        let batch = RecordBatch::try_from_iter([("text", texts(&[Some(&text[..]); 5]))]).unwrap();
        let mut rows = new_rows();
        rows.put(batch);

        let sizes: Vec<usize> = (0..4).map(|_| rows.take(Path::new("a")).unwrap().len()).collect();

        assert_eq!(sizes, [2, 2, 1, 0]);
    }

    #[test]
    fn columns_that_no_value_has_the_type_of_are_named() {
        let mut lists = ListBuilder::new(StringBuilder::new());
        lists.append(true);
        let binary = DataType::LargeBinary;
        let inner =
            Fields::from(vec![Field::new("content", binary.clone(), true), Field::new("role", DataType::Utf8, true)]);
        let item = Arc::new(Field::new("item", DataType::Struct(inner), true));
        let fields = Fields::from(vec![
            Field::new("text", DataType::Binary, true),
            Field::new("words", lists.finish().data_type().clone(), true),
            Field::new("messages", DataType::List(item), true),
        ]);

        let names: Vec<String> =
            left_out(&fields).into_iter().map(|left| format!("{} {}", left.name, left.kind)).collect();

        assert_eq!(names, ["text binary", "content binary"]);
        assert_eq!(leaves_that_are_read(&fields, &[]), (vec![1, 3], 4));
        assert_eq!(leaves_that_are_read(&fields, &["messages".to_owned()]), (vec![1, 2, 3], 4));
    }
}
