//! An object store that stops after a number of operations, loses the answer to one, or performs one twice.

use std::fmt::{self, Display, Formatter};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::replaced_worlds::Meanwhile;
use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use object_store::path::Path as Key;
use object_store::*;

/// The injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    Nothing,
    /// Every operation after this many fails and does nothing, as if the process had been killed there.
    StopsAfter(usize),
    /// The operation with this number is performed but reports a failure.
    AnswerLost(usize),
    /// The operation with this number is performed twice: the client lost the first answer, repeated the request and gets
    /// the second answer. Parts of large objects and their completion are not repeated: a client repeats a part under its
    /// number, which this trait does not expose.
    Repeats(usize),
    /// Every operation is performed twice.
    RepeatsAll,
}

/// An object store with a fault; clones share it.
#[derive(Clone, Debug)]
pub(super) struct FaultyObjects {
    objects: Arc<dyn ObjectStore>,
    fault: Fault,
    n_operations: Arc<AtomicUsize>,
    meanwhile: Meanwhile,
}

impl FaultyObjects {
    pub(super) fn new(objects: Arc<dyn ObjectStore>, fault: Fault) -> Self {
        Self { objects, fault, n_operations: Arc::default(), meanwhile: Meanwhile::nothing() }
    }

    /// The same store, whose user is suspended before an operation.
    pub(super) fn suspended(self, meanwhile: Meanwhile) -> Self {
        Self { meanwhile, ..self }
    }

    pub(super) fn n_operations(&self) -> usize {
        self.n_operations.load(Ordering::SeqCst)
    }

    /// Counts an operation and returns its fate.
    fn operate(&self) -> Result<Fate> {
        let number = self.n_operations.fetch_add(1, Ordering::SeqCst);
        self.meanwhile.before(number);
        match self.fault {
            Fault::StopsAfter(n) if number >= n => Err(broken()),
            Fault::AnswerLost(n) if number == n => Ok(Fate::AnswerLost),
            Fault::Repeats(n) if number == n => Ok(Fate::Repeated),
            Fault::RepeatsAll => Ok(Fate::Repeated),
            _ => Ok(Fate::Normal),
        }
    }
}

/// What happens to one operation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Normal,
    AnswerLost,
    Repeated,
}

fn broken() -> Error {
    Error::Generic { store: "faulty", source: "the store has stopped".into() }
}

fn answer<T>(found: Result<T>, fate: Fate) -> Result<T> {
    if fate == Fate::AnswerLost { Err(broken()) } else { found }
}

impl Display for FaultyObjects {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.objects)
    }
}

#[async_trait]
impl ObjectStore for FaultyObjects {
    async fn put_opts(&self, key: &Key, content: PutPayload, options: PutOptions) -> Result<PutResult> {
        let fate = self.operate()?;
        if fate == Fate::Repeated {
            let _ = self.objects.put_opts(key, content.clone(), options.clone()).await;
        }
        answer(self.objects.put_opts(key, content, options).await, fate)
    }
    async fn put_multipart_opts(&self, key: &Key, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        let fate = self.operate()?;
        let upload = answer(self.objects.put_multipart_opts(key, options).await, fate)?;
        Ok(Box::new(FaultyUpload { upload, objects: self.clone() }))
    }
    async fn get_opts(&self, key: &Key, options: GetOptions) -> Result<GetResult> {
        let fate = self.operate()?;
        answer(self.objects.get_opts(key, options).await, fate)
    }
    fn delete_stream(&self, keys: BoxStream<'static, Result<Key>>) -> BoxStream<'static, Result<Key>> {
        let this = self.clone();
        let delete = move |key: Result<Key>| {
            let this = this.clone();
            async move {
                let key = key?;
                let fate = this.operate()?;
                if fate == Fate::Repeated {
                    let _ = this.objects.delete(&key).await;
                }
                answer(this.objects.delete(&key).await.map(|()| key), fate)
            }
        };
        keys.then(delete).boxed()
    }
    fn list(&self, prefix: Option<&Key>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.objects.list(prefix)
    }
    async fn list_with_delimiter(&self, prefix: Option<&Key>) -> Result<ListResult> {
        let fate = self.operate()?;
        answer(self.objects.list_with_delimiter(prefix).await, fate)
    }
    async fn copy_opts(&self, from: &Key, to: &Key, options: CopyOptions) -> Result<()> {
        self.objects.copy_opts(from, to, options).await
    }
}

#[derive(Debug)]
struct FaultyUpload {
    upload: Box<dyn MultipartUpload>,
    objects: FaultyObjects,
}

#[async_trait]
impl MultipartUpload for FaultyUpload {
    fn put_part(&mut self, content: PutPayload) -> UploadPart {
        match self.objects.operate() {
            Ok(_) => self.upload.put_part(content),
            Err(error) => Box::pin(async { Err(error) }),
        }
    }
    async fn complete(&mut self) -> Result<PutResult> {
        let fate = self.objects.operate()?;
        answer(self.upload.complete().await, fate)
    }
    async fn abort(&mut self) -> Result<()> {
        self.upload.abort().await
    }
}
