import pytest

from unimetric.errors import UnimetricError
from unimetric.spec import bind, create


def read(file, extra=""):
    return create("datasets", f"csv(file={str(file)!r}{', ' if extra else ''}{extra})")


@pytest.fixture
def plain(tmp_path, plant):
    """Plain path,label: labels are numbers, of which 10 is the last."""
    rows = [(f"pictures/{label}_{number}.jpg", label) for label in (10, 2, 1, 3) for number in range(2)]
    plant(tmp_path, [path for path, _ in rows])
    (tmp_path / "toys.csv").write_text("path,label\n" + "".join(f"{path},{label}\n" for path, label in rows))
    return tmp_path / "toys.csv"


@pytest.fixture
def roles(tmp_path, plant):
    """As open-metric-learning writes it: roles of training pictures are empty, boxes may be there."""
    text = """label,path,split,is_query,is_gallery,x_1,x_2,y_1,y_2
        cat,c1.jpg,train,,,0,1,0,1
        cat,c2.jpg,train,,,0,1,0,1
        cow,w1.jpg,train,,,0,1,0,1
        cow,w2.jpg,train,,,0,1,0,1
        ant,a1.jpg,validation,True,False,0,1,0,1
        ant,a2.jpg,validation,False,True,0,1,0,1
        bee,b1.jpg,validation,True,True,0,1,0,1
        bee,b2.jpg,validation,1,1.0,0,1,0,1
        elk,e1.jpg,validation,False,True,0,1,0,1
    """
    lines = [line.strip() for line in text.strip().splitlines()]
    plant(tmp_path, [line.split(",")[1] for line in lines[1:]])
    (tmp_path / "oml.csv").write_text("\n".join(lines))
    return tmp_path / "oml.csv"


def test_plain(plain):
    table = read(plain)
    assert table.class_names == ("1", "2", "3", "10")
    assert [table.class_names[label] for label in table.labels] == ["10", "10", "2", "2", "1", "1", "3", "3"]
    assert table.train.tolist() == [False, False, True, True, True, True, False, False]
    assert table.paths[0] == f"{plain.parent}/pictures/10_0.jpg"
    assert table.source_names == ("toys",) and read(plain, "name='bricks'").source_names == ("bricks",)
    assert table.query.all() and table.gallery.all()


def test_labels_of_floats_keep_their_order_with_a_warning(plain, caplog):
    assert read(plain).class_names[-1] == "10" and not caplog.text
    lines = plain.read_text().splitlines()
    plain.write_text("\n".join([lines[0], *(f"{line}.0" for line in lines[1:])]))
    assert read(plain).class_names == ("1.0", "10.0", "2.0", "3.0")  # as in existing runs, which number their classes so
    assert "labels such as `1.0` are sorted as words; write `1`" in caplog.text


def test_link_to_nothing_is_missing(plain):
    victim = plain.parent / "pictures" / "2_0.jpg"
    victim.rename(plain.parent / "elsewhere.jpg")
    victim.symlink_to(plain.parent / "elsewhere.jpg")
    assert len(read(plain)) == 8
    (plain.parent / "elsewhere.jpg").unlink()
    with pytest.raises(UnimetricError, match="1 of 8 listed images are missing"):
        read(plain)


def test_nan_is_a_value_with_a_warning(plain, caplog):
    lines = plain.read_text().splitlines()
    plain.write_text("\n".join([f"{lines[0]},camera", *(f"{line},{'nan' if line[-1] == '1' else 'c1'}" for line in lines[1:])]))
    assert read(plain).group_names == ("c1", "nan")
    assert "`camera` is `nan` in 2 lines, which share this value; leave it empty" in caplog.text and "`label` is" not in caplog.text
    plain.write_text(plain.read_text().replace(",10,", ",NaN,"))
    assert "NaN" in read(plain).class_names and "`label` is `nan` in 2 lines" in caplog.text


def test_absolute_paths_and_a_byte_order_mark(plain):
    text = plain.read_text().replace("pictures/", f"{plain.parent}/pictures/")
    other = plain.parent / "elsewhere" / "list.csv"
    other.parent.mkdir()
    other.write_text(text, encoding="utf-8-sig")
    assert read(other).paths == read(plain).paths


def test_columns_of_open_metric_learning(roles):
    table = read(roles)
    assert table.class_names == ("ant", "bee", "cat", "cow", "elk")
    assert table.train.tolist() == [True] * 4 + [False] * 5
    assert table.query[4:].tolist() == [True, False, True, True, False]
    assert table.gallery[4:].tolist() == [False, True, True, True, True]
    assert table.query[:4].all() and table.gallery[:4].all()  # so that some may validate
    split, arguments = bind("splits", "standard")
    assert split(table, **arguments).test.tolist() == [4, 5, 6, 7, 8]  # elk is alone and only answers: a distractor


def test_train_overrides_the_column(roles):
    table = read(roles, "train=0.4")
    assert {table.class_names[label] for label in table.labels[table.train]} == {"ant", "bee"}


def test_roles_may_be_absent_or_silent(roles):
    lines = [line.split(",") for line in roles.read_text().splitlines()][:-1]
    roles.write_text("\n".join(",".join(line[:3]) for line in lines))
    assert read(roles).query.all() and read(roles).gallery.all()
    roles.write_text(
        "\n".join(",".join([*line[:3], *(["is_query", "is_gallery"] if row == 0 else ["", ""])]) for row, line in enumerate(lines))
    )
    assert read(roles).query.all() and read(roles).gallery.all()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("path,label", "file,label", "has no column `path`"),
        ("path,label", "path;label", "has no column `path`"),
        ("2_0.jpg,2", "2_0.jpg,", "line 4: the label is missing"),
        ("2_0.jpg,2", "2_0.jpg", "line 4: the label is missing"),
        ("pictures/2_0.jpg,2", ",2", "line 4: the path is missing"),
        ("2_0.jpg,2", "2_0.jpg,2,3", "line 4: more values than columns"),
        ("2_0.jpg,2", '2_0.jpg,"2', "line 4: unexpected end of data"),
        ("2_0.jpg", "2_0.txt", "line 4: .* got `pictures/2_0.txt`"),
        ("2_0.jpg", "../pictures/2_1.jpg", "line 5: .* is listed in line 4 already"),
        ("2_0.jpg", "lost.jpg", "1 of 8 listed images are missing"),
        ("2_0.jpg,2", "2_0.jpg,4", "2 of 5 classes have only one image, the first is `4`"),
    ],
)
def test_bad_lines(plain, old, new, message):
    assert old in plain.read_text()
    plain.write_text(plain.read_text().replace(old, new, 1))
    with pytest.raises(UnimetricError, match=message) as caught:
        read(plain)
    assert caught.value.hint


def test_skipping_goes_on_to_the_classes(plain):
    (plain.parent / "pictures" / "2_0.jpg").unlink()
    with pytest.raises(UnimetricError, match="the first is `2`"):
        read(plain, "on_missing='skip'")
    assert len(read(plain, "on_missing='skip', on_single='skip'")) == 6


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ("a1.jpg,validation,True", "a1.jpg,validation,yse", "line 6: `is_query` must be True or False, got `yse`", "use True or False"),
        ("a1.jpg,validation", "a1.jpg,validatoin", "line 6: unknown split `validatoin`", "did you mean `validation`?"),
    ],
)
def test_bad_roles(roles, old, new, message, hint):
    roles.write_text(roles.read_text().replace(old, new))
    with pytest.raises(UnimetricError, match=message) as caught:
        read(roles)
    assert caught.value.hint == hint


def test_no_file_no_text_no_lines(tmp_path):
    with pytest.raises(UnimetricError, match="does not exist"):
        read(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(UnimetricError, match="cannot read"):
        read(tmp_path / "bytes.csv")
    (tmp_path / "empty.csv").write_text("path,label\n")
    with pytest.raises(UnimetricError, match=r"empty.csv.*no images are listed") as caught:
        read(tmp_path / "empty.csv")
    assert "one line per image" in caught.value.hint


@pytest.mark.parametrize("column", ["group", "camera", "sequence", "encounter", "date"])
def test_groups_of_images(roles, column):
    lines = roles.read_text().splitlines()
    values = ["", "", "", "", "c1", "c2", "c1", " c1 ", "c2"]
    roles.write_text("\n".join([f"{lines[0]},{column}", *(f"{line},{value}" for line, value in zip(lines[1:], values, strict=True))]))
    table = read(roles)
    assert table.group_names == ("c1", "c2") and table.group.tolist() == [-1] * 4 + [0, 1, 0, 0, 1]
    assert table.group_rule == "class" and read(roles, "group_rule='group'").group_rule == "group"
    assert not read(roles, "group=''").group_names
    assert read(roles, "group='label'").group_names == ("ant", "bee", "cat", "cow", "elk")
    with pytest.raises(UnimetricError, match="no column `camra`"):
        read(roles, "group='camra'")


def test_first_of_several_group_columns_is_used(plain):
    lines = plain.read_text().splitlines()
    plain.write_text(
        "\n".join([f"{lines[0]},date,camera", *(f"{line},2020-01-0{row + 1},c{row % 2}" for row, line in enumerate(lines[1:]))])
    )
    assert read(plain).group_names == ("c0", "c1")
    assert len(read(plain, "group='date'").group_names) == 8


def test_dates_have_days_in_any_form(plain):
    days = ["6/3/2019"] * 2 + ["2019:06:04"] + ["2019-6-4"] + ["20190605"] * 2 + ["30 June 2018", "30 June 2019"]
    times = (" 8:15", " 21:40", "-07:00:00", "T17:00", "T0815", "_214000", "", " 8:15 PM")
    lines = plain.read_text().splitlines()
    plain.write_text("\n".join([f"{lines[0]},date", *map("{},{}{}".format, lines[1:], days, times)]))
    table = read(plain)
    assert [table.group_names[group] for group in table.group] == days


def test_two_parts_that_are_both_tested_are_named(roles, caplog):
    read(roles)
    assert not caplog.text
    roles.write_text(roles.read_text().replace("e1.jpg,validation", "e1.jpg,test"))
    read(roles)
    assert "are those of test and validation" in caplog.text


def test_an_address_is_not_a_folder():
    with pytest.raises(UnimetricError, match="must be a local folder, got the address `memory://b`") as caught:
        create("datasets", "folder(root='memory://b')")
    assert "csv(file=" in caught.value.hint
