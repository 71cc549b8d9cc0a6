//! Examples, one idea each; `README.md` of this folder is the index.
