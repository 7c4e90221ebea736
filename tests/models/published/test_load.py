import pytest
import torch

from escnn_attention.models import from_published
from tests.models.published.test_attgconv import rotated_mnist


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"^kind: got 'resnet'"):
        from_published({}, kind="resnet")
    with pytest.raises(TypeError, match=r"^crops: .*no such option"):
        from_published(rotated_mnist(), kind="att_gconvs", crops=(1,))
    with pytest.raises(TypeError, match=r"^tensors: got list"):
        from_published([torch.ones(1)], kind="gevit")
    with pytest.raises(ValueError, match=r"row_indices: missing; got .*c1.weight"):
        from_published(rotated_mnist(), kind="g_selfatt")
