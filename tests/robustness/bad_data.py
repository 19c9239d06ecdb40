"""Bad data: missing, empty, damaged or of another kind than the model needs."""

from workspace import after, bad, broken_image, file, image_folder, one_class, text, write_tokens

NOT_UTF8 = b"good line\nbad \xff\xfe line\n" * 20


BAD_DATA = {
    "file that is not an image": bad(after(broken_image, image_folder()), "0.png", notice="images of 2 classes"),
    "folder of one class": bad(
        after(one_class, image_folder()), "config.num_classes=1", "'cat'", notice="images of 1 classes"
    ),
    "text that is not UTF-8": bad(
        after(file("a.txt", NOT_UTF8), text("text", "{folder}/a.txt")), "a.txt:2: not UTF-8", "byte 5"
    ),
    "tokens beyond the vocabulary in a later row": bad(
        after(write_tokens, text("megatron", "{folder}/pair", vocab_size=190)), "token 190", starts=True
    ),
    "damaged records": bad(
        after(file("a.tfrecord", b"\1" * 40), text("input_ids", "{folder}/a.tfrecord", vocab_size=257)),
        "a.tfrecord",
        "damaged",
        "record 0",
        notice="records",
    ),
}
